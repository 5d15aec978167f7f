"""Starts the ranks of a group on this machine, bounded in time, and leaves no process behind. For demo and tests; under
torchrun the ranks are there already."""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import select
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from moe_tk.errors import MoETkError
from moe_tk.liveness import ProcessName, own_process

PRELOAD = ("torch", "moe_tk.layer", "moe_tk.ops")  # imported once by the fork server, not once per rank


class RankFailure(MoETkError):
    """A rank raised, died or did not end in time; the text has every rank's outcome."""


@dataclass(frozen=True)
class Outcome:
    """How one rank ended: `value` if `error` is None. exit_code is negative for a signal."""

    value: Any = None
    error: str | None = None
    exit_code: int | None = None


def _end_with(launcher: ProcessName) -> None:
    """Kills this process when the one that launched it is gone: its parent is the fork server, which may outlive both."""
    with contextlib.suppress(ProcessLookupError):
        pidfd = os.pidfd_open(launcher.pid)
        while not launcher.gone:
            select.select([pidfd], [], [], 1.0)
    os.kill(os.getpid(), signal.SIGKILL)


def _rank_main(connection: Any, target: Callable, rank: int, world: int, store: str, timeout_s: float, launcher: ProcessName,
               environment: dict[str, str], device: int | None, args: tuple) -> None:
    threading.Thread(target=_end_with, args=(launcher,), name="watch of the launcher", daemon=True).start()
    os.environ.clear()  # the fork server's is the one of its start
    os.environ.update(environment)
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    try:
        if device is not None:
            torch.cuda.set_device(device)
        dist.init_process_group("gloo" if device is None else "cpu:gloo,cuda:nccl", store=dist.FileStore(store, world), rank=rank,
                                world_size=world, timeout=timedelta(seconds=timeout_s))
        value = target(rank, world, *args)
        connection.send(("value", value))
    except BaseException:
        connection.send(("error", traceback.format_exc()))
    finally:
        connection.close()
        if device is not None:
            os._exit(0)  # a peer may be gone, and NCCL's part of a group is taken down by all ranks together
        if dist.is_initialized():
            dist.destroy_process_group()


class RankProcesses:
    """`world` processes that run target(rank, world, *args). Use as a context manager: leaving it kills what is left. They end
    with this process, also when it is killed.

    devices  index of each rank's GPU, which is its current device then, in a group with gloo and NCCL; None: ranks of the CPU
    """

    def __init__(self, world: int, target: Callable, *args: Any, timeout_s: float = 120.0,
                 devices: Sequence[int] | None = None) -> None:
        self._devices = [None] * world if devices is None else list(devices)
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(list(PRELOAD))
        self.world, self.deadline, self.timeout_s = world, time.monotonic() + timeout_s, timeout_s
        self._folder = tempfile.TemporaryDirectory(prefix="moe_tk_store_")
        self._pipes, self.processes, self._messages = [], [], {}
        try:
            for rank in range(world):
                self._start(context, rank, target, args)
        except BaseException:
            self.__exit__()
            raise

    def _start(self, context: Any, rank: int, target: Callable, args: tuple) -> None:
        receive, send = context.Pipe(duplex=False)
        process = context.Process(target=_rank_main, name=f"rank {rank}", daemon=True,
                                  args=(send, target, rank, self.world, f"{self._folder.name}/store", self.timeout_s, own_process(),
                                        dict(os.environ), self._devices[rank], args))
        process.start()
        send.close()
        self._pipes.append(receive)
        self.processes.append(process)

    def __enter__(self) -> RankProcesses:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            if process.is_alive():
                process.kill()
            process.join(5)
        self._folder.cleanup()

    def outcomes(self) -> list[Outcome]:
        """Waits for all ranks, until the deadline; a rank that is not done then is killed and says so in its outcome."""
        waiting = dict(enumerate(self._pipes))
        while waiting and time.monotonic() < self.deadline:
            ready = multiprocessing.connection.wait(list(waiting.values()), timeout=0.5)
            for rank in [r for r, pipe in waiting.items() if pipe in ready]:
                try:
                    self._messages[rank] = waiting[rank].recv()
                except (EOFError, OSError):  # it died, perhaps in the middle of its message
                    self._messages[rank] = ("error", None)
                del waiting[rank]
        for rank in waiting:
            self._messages[rank] = ("error", f"did not end within {self.timeout_s:g} s")
        results = []
        for rank, process in enumerate(self.processes):
            process.join(max(0.1, min(10.0, self.deadline - time.monotonic())) if rank not in waiting else 0)
            if process.is_alive():
                process.kill()
                process.join(5)
            kind, payload = self._messages[rank]
            code = process.exitcode
            if kind == "value":
                results.append(Outcome(value=payload, exit_code=code))
            else:
                results.append(Outcome(error=payload or f"process ended with exit code {code}", exit_code=code))
        return results


def run_ranks(world: int, target: Callable, *args: Any, timeout_s: float = 120.0) -> list[Any]:
    """[target(rank, world, *args) for all ranks], each in its own process with a gloo group of `world` ranks.

    target must be importable (a module-level function), args and results picklable. Raises RankFailure if any rank
    fails; no process is left after timeout_s.
    """
    with RankProcesses(world, target, *args, timeout_s=timeout_s) as ranks:
        outcomes = ranks.outcomes()
    failed = [(rank, outcome.error) for rank, outcome in enumerate(outcomes) if outcome.error is not None]
    if failed:
        raise RankFailure("\n".join(f"rank {rank}: {text}" for rank, text in failed))
    return [outcome.value for outcome in outcomes]
