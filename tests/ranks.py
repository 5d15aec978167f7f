"""Ranks for tests: processes that stay up between tests, each job watched, and checked for what it leaves behind.

A job is a module-level function target(rank, world, ...) that every rank calls; modules with such functions import no
pytest, since every rank loads them. After a job no workspace, mapping or watch thread may be left in any rank.

Ranks of the CPU back end ("cpu") have a gloo group. Those of the CUDA back end ("cuda") have a GPU each, as the current
device, and a group with gloo and NCCL; the GPU's index is not the rank, so that nothing can take the one for the other.
"""

from __future__ import annotations

import gc
import multiprocessing
import multiprocessing.connection
import os
import pickle
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from moe_tk.memory.shm import PREFIX, SHM_DIR
from moe_tk.runtime.host import host_module
from moe_tk.runtime.launcher import Outcome, RankProcesses

JOB_LIMIT_S = 60.0
GRACE_S = 2.0  # for the other ranks, once one has failed
KEPT = ("MOE_TK_CACHE_DIR",)


class RanksFailed(AssertionError):
    """A rank raised, died, left something behind, or did not end in time; the text has every rank's traceback.

    usable  whether all ranks of a CUDA pool told so in time and are clean: then they go on, since GPUs take long to start
    """

    usable = False


def segments_of(pids: list[int]) -> list[str]:
    """Names in /dev/shm that these processes made."""
    wanted = {str(pid) for pid in pids}
    return [path.name for path in SHM_DIR.glob(f"{PREFIX}.*.*.*.*") if path.name.split(".")[2] in wanted]


def leftovers() -> list[str]:
    """What this process still holds of moe_tk: workspaces, mapped segments, watch threads."""
    from moe_tk.ops import release_ops_memory
    from moe_tk.runtime.session import _live

    release_ops_memory()
    gc.collect()
    cuda = sys.modules.get("moe_tk.runtime.nvlink_session")
    live = [*_live, *(cuda._live if cuda else ())]
    mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if f"{SHM_DIR}/{PREFIX}." in line]
    threads = [thread.name for thread in threading.enumerate() if thread.name.startswith("moe_tk")]
    return [f"session {session.geometry}" for session in live] + mapped + threads


def gone(pid: int) -> bool:
    """Whether a process has ended."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


@contextmanager
def rank_environment(folder: Path) -> Iterator[None]:
    """The environment in which ranks start: none of the caller's moe_tk variables, records in `folder`, a short set-up limit."""
    before = dict(os.environ)
    for name in [name for name in os.environ if name.startswith("MOE_TK_") and name not in KEPT]:
        del os.environ[name]
    os.environ.update(MOE_TK_RECORD_DIR=str(folder), MOE_TK_FIRST_CALL_TIMEOUT_S="30", GLOO_SOCKET_IFNAME="lo")
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def devices_of(backend: str, world: int) -> list[int] | None:
    """Index of each rank's GPU, or None for ranks of the CPU back end."""
    if backend == "cpu":
        return None
    import torch

    return [(rank + 1) % torch.cuda.device_count() for rank in range(world)]


def build_module(backend: str) -> None:
    """Builds the native module of a back end here, so that no rank's time goes into the compiler."""
    if backend == "cpu":
        host_module()
    else:
        from moe_tk.runtime.nvlink import nvlink_module

        nvlink_module()


def _serve(rank: int, world: int, pipes: list[Any]) -> None:
    """What a rank of a pool does: jobs, until None or the end of the pipe."""
    for other, pipe in enumerate(pipes):
        if other != rank:
            pipe.close()
    gc.collect()
    gc.freeze()  # what is there by now need not be looked through after every job
    while True:
        try:
            blob = pipes[rank].recv_bytes()
        except EOFError:
            return
        job = None
        try:
            job = pickle.loads(blob)
            if job is None:
                return
            target, args, named = job
            answer = ("value", target(rank, world, *args, **named))
        except BaseException:
            answer = ("error", traceback.format_exc())
        pipes[rank].send(_checked(answer, job))


def _checked(answer: tuple[str, Any], job: Any) -> tuple[str, Any, bool]:
    """(kind, value or text, whether this rank can go on) after a job."""
    try:
        left = leftovers()
        if "torch.cuda" in sys.modules and sys.modules["torch.cuda"].is_initialized():
            sys.modules["torch.cuda"].synchronize()  # raises when the context has been lost
    except BaseException:
        return "error", f"{answer[1] if answer[0] == 'error' else ''}\nand afterwards: {traceback.format_exc()}", False
    if left and answer[0] == "value":
        answer = ("error", f"left behind by {job}: {left}")
    return *answer, not left


class Pool:
    """`world` ranks that wait for jobs."""

    def __init__(self, world: int, folder: Path, backend: str) -> None:
        self.backend = backend
        context = multiprocessing.get_context("forkserver")
        pairs = [context.Pipe() for _ in range(world)]
        self.pipes = [mine for mine, _ in pairs]
        with rank_environment(folder):
            self.ranks = RankProcesses(world, _serve, [theirs for _, theirs in pairs], timeout_s=600.0,
                                       devices=devices_of(backend, world))
        self.pids = [process.pid for process in self.ranks.processes]
        for _, theirs in pairs:
            theirs.close()

    def run(self, target: Callable, args: tuple, named: dict[str, Any], limit_s: float) -> list[Any]:
        """Results of all ranks. Raises RanksFailed, which says whether the pool is of use afterwards."""
        blob = pickle.dumps((target, args, named))
        answers: dict[int, tuple[str, Any, bool]] = {}
        deadline = time.monotonic() + limit_s
        for rank, pipe in enumerate(self.pipes):
            try:
                pipe.send_bytes(blob)
            except OSError:
                answers[rank] = ("error", "the process had died since its last job", False)
                deadline = time.monotonic() + GRACE_S
        while len(answers) < len(self.pipes) and time.monotonic() < deadline:
            waiting = [pipe for rank, pipe in enumerate(self.pipes) if rank not in answers]
            for pipe in multiprocessing.connection.wait(waiting, timeout=max(0.0, deadline - time.monotonic())):
                rank = self.pipes.index(pipe)
                try:
                    answers[rank] = pipe.recv()
                except (EOFError, ConnectionResetError):
                    answers[rank] = ("error", "the process died", False)
                if answers[rank][0] == "error":
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        failed = [f"rank {rank}: {text}" for rank, (kind, text, _) in sorted(answers.items()) if kind == "error"]
        silent = [rank for rank in range(len(self.pipes)) if rank not in answers]
        if failed or silent:
            error = RanksFailed("\n".join([*failed, *(f"rank {rank}: did not end in time" for rank in silent)]))
            error.usable = self.backend == "cuda" and not silent and all(usable for _, _, usable in answers.values())
            raise error
        return [answers[rank][1] for rank in range(len(self.pipes))]

    def close(self, *, kindly: bool = True) -> None:
        """Ends the ranks, by a last message or (after a failure) at once; asserts that no process and no segment is left."""
        if kindly:
            for pipe in self.pipes:
                with suppress(OSError):  # of a rank that has died
                    pipe.send_bytes(pickle.dumps(None))
            for process in self.ranks.processes:
                process.join(5)
        self.ranks.__exit__()
        assert_nothing_left(self.pids)


class Pools:
    """Pools by back end and world size, started on first use and kept while their jobs end well."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._pools: dict[tuple[str, int], Pool] = {}

    def run(self, world: int, target: Callable, *args: Any, backend: str = "cpu", limit_s: float = JOB_LIMIT_S,
            **named: Any) -> list[Any]:
        """[target(rank, world, *args, **named) of every rank]. Raises RanksFailed if any rank fails, hangs or leaves something."""
        build_module(backend)
        key = backend, world
        if key not in self._pools:
            self._pools[key] = Pool(world, self.folder, backend)
        try:
            return self._pools[key].run(target, args, named, limit_s)
        except RanksFailed as error:
            if not error.usable:
                self._pools.pop(key).close(kindly=False)
            raise

    def fresh(self, world: int, target: Callable, *args: Any, backend: str = "cpu", limit_s: float = JOB_LIMIT_S) -> list[Outcome]:
        """Outcomes of ranks that run target only: for jobs that leave their process group in no state to go on."""
        build_module(backend)
        with rank_environment(self.folder), RankProcesses(world, target, *args, timeout_s=limit_s,
                                                          devices=devices_of(backend, world)) as ranks:
            pids = [process.pid for process in ranks.processes]
            outcomes = ranks.outcomes()
        assert_nothing_left(pids)
        return outcomes

    def close(self) -> None:
        with ExitStack() as all_of_them:  # also behind one that has left something
            for pool in self._pools.values():
                all_of_them.callback(pool.close)


def assert_nothing_left(pids: list[int]) -> None:
    """No process and no shared-memory segment of these ranks may be left."""
    alive = [pid for pid in pids if not gone(pid)]
    assert not alive, f"processes are left: {alive}"
    assert segments_of(pids) == []
