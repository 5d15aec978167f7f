"""Starts the ranks, or joins those that torchrun has started, and gives their records back."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

from moe_tk.builder.build import build_cuda_module, build_host_module
from moe_tk.builder.native_root import native_modules
from moe_tk.demo.options import MAX_WORLD, Options, default_world
from moe_tk.demo.records import Failure, RankRecord
from moe_tk.errors import ArgumentError
from moe_tk.runtime.launcher import RankFailure, RankProcesses

CUDA_MODULE, CUDA_ARCH = "moe_tk_nvlink", "90a"  # as in moe_tk.runtime.nvlink, which would load it here
LIMIT_S = 600.0  # of the whole run; every wait inside has its own, shorter limit
Progress = Callable[[str, int], None]


def build_module(backend: str = "cpu") -> None:
    """Builds the native module if it is not in the cache, before any rank waits for another."""
    for module in native_modules():
        if backend == "cpu" and module.kind == "host":
            build_host_module(module.name, module.sources)
        elif backend == "cuda" and module.name == CUDA_MODULE:
            build_cuda_module(module.name, module.sources, arch=CUDA_ARCH)


def start_ranks(options: Options, show: Progress, target: Callable | None = None) -> list[RankRecord]:
    """Runs the demo in processes of its own. Raises RankFailure with one sentence about the rank that failed first.

    target  what a rank does; default moe_tk.demo.run.rank_main, same arguments and result
    """
    world = options.world or default_world(options)
    build_module(options.backend)
    show(f"starting {world} rank{'s' * (world > 1)}", 0)
    # Not Pipe() of the plain module: both ends are handed over to processes of the fork server.
    receive, send = multiprocessing.get_context("forkserver").Pipe(duplex=False)
    devices = options.devices[:world] if options.backend == "cuda" else None
    with RankProcesses(world, target or _rank_main, options, send, timeout_s=LIMIT_S, devices=devices) as ranks:
        send.close()
        listener = threading.Thread(target=_listen, args=(receive, show), daemon=True)
        listener.start()
        outcomes = ranks.outcomes()
        listener.join(5)  # ends with the last rank: nobody holds the other end any more
    values = [outcome.value if outcome.error is None else _died(rank, outcome.error) for rank, outcome in enumerate(outcomes)]
    return checked(values, debug=options.debug)


def _rank_main(rank: int, world: int, options: Options, send: Any) -> RankRecord | Failure:
    from moe_tk.demo.run import rank_main

    return rank_main(rank, world, options, send)


def _died(rank: int, error: str) -> Failure:
    """Of a rank that left no record. It tells no time: it was first, the others failed for its sake."""
    return Failure(rank, float("-inf"), _last_line(error), error if "\n" in error else "")


def _listen(receive: Any, show: Progress) -> None:
    while True:
        try:
            message = receive.recv()
        except (EOFError, OSError):
            return
        with suppress(OSError):  # nobody reads our output any more: go on taking, or rank 0 would block
            show(*message)


def under_launcher() -> bool:
    """Whether this process is one rank of several that exist already. Loads torch."""
    import torch.distributed as dist

    return dist.is_available() and (dist.is_initialized() or dist.is_torchelastic_launched())


def prints_here() -> bool:
    """Whether this process is the one that prints. Works before there is a group."""
    if not under_launcher():
        return True
    import torch.distributed as dist

    return (dist.get_rank() if dist.is_initialized() else dist.get_node_local_rank(fallback_rank=0)) == 0


def join_ranks(options: Options, show: Progress) -> list[RankRecord] | None:
    """Runs the demo as one rank of the default group, made if it is not there. The records on rank 0, None elsewhere.

    Raises ArgumentError when --world is not the number of ranks, RankFailure (rank 0 only) as start_ranks.
    """
    import torch.distributed as dist

    from moe_tk.demo.run import guarded

    ours, on_gpus = not dist.is_initialized(), options.backend == "cuda"
    if on_gpus and ours:
        import torch

        torch.cuda.set_device(options.devices[dist.get_node_local_rank(fallback_rank=0)])
    if ours:
        dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpus else "gloo", timeout=timedelta(seconds=LIMIT_S))
    try:
        rank, world = dist.get_rank(), dist.get_world_size()
        if options.world not in (None, world):
            raise ArgumentError(f"--world is {options.world}, but {world} ranks were started: leave it out")
        if world > MAX_WORLD:
            raise ArgumentError(f"{world} ranks were started, wanted at most {MAX_WORLD}")
        record = guarded(rank, world, options, show if rank == 0 else lambda stage, done: None)
        values: list[Any] | None = [None] * world if rank == 0 else None
        try:
            dist.gather_object(record, values, dst=0)
        except RuntimeError as error:
            raise RankFailure(f"the results of the ranks could not be collected: {_last_line(str(error))}") from error
        return None if values is None else checked(values, debug=options.debug)
    finally:
        if ours:
            dist.destroy_process_group()


def checked(values: Sequence[RankRecord | Failure], *, debug: bool) -> list[RankRecord]:
    """The records, if all are; else raises RankFailure about the rank that failed first: the others fail for its sake."""
    failures = sorted((value for value in values if isinstance(value, Failure)), key=lambda failure: failure.when)
    if not failures:
        return list(values)
    first, others = failures[0], len(failures) - 1
    text = f"rank {first.rank} failed: {first.text}"
    if others:
        text += f" ({others} other rank{'s' * (others > 1)} stopped because of it)"
    if debug:
        text += "".join(f"\n\nrank {failure.rank}:\n{failure.where}" for failure in failures if failure.where)
    elif first.where:
        text += " (--debug shows where)"
    raise RankFailure(text)


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["no message"])[-1]
