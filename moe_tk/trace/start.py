"""Starts the ranks of a traced call, or joins those that torchrun has started, and puts their laps on one clock."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

from moe_tk.demo.records import Failure
from moe_tk.demo.start import build_module, checked, under_launcher
from moe_tk.errors import ArgumentError, TopologyError
from moe_tk.runtime.launcher import RankProcesses
from moe_tk.trace.model import Trace
from moe_tk.trace.options import DEFAULT_CPU_WORLD, Options

LIMIT_S = 600.0
GROUP = "cpu:gloo,cuda:nccl"


def hoppers() -> int:
    """GPUs here that the kernels run on. Loads torch."""
    import torch

    if not torch.cuda.is_available():
        return 0
    return sum(torch.cuda.get_device_capability(index) == (9, 0) for index in range(torch.cuda.device_count()))


def choose_backend(options: Options) -> tuple[str, int]:
    """("cuda" or "cpu", number of ranks). Raises TopologyError when GPUs are asked for and there are too few."""
    found = 0 if options.backend == "cpu" else hoppers()
    if options.backend == "cpu" or (options.backend == "auto" and found == 0):
        return "cpu", options.world or DEFAULT_CPU_WORLD
    world = options.world or max(1, found)
    if found < world:
        raise TopologyError(f"--backend cuda wants {world} GPU{'s' * (world > 1)} of compute capability 9.0 (Hopper) for {world} "
                            f"rank{'s' * (world > 1)}, and there {'is' if found == 1 else 'are'} {found or 'none'} here: use "
                            "--backend cpu, or a smaller --world")
    return "cuda", world


def record_all(options: Options) -> list[Trace] | None:
    """The trace of every point; None on a rank that does not print. Raises RankFailure about the rank that failed first."""
    return _join(options) if under_launcher() else _start(options)


def _start(options: Options) -> list[Trace]:
    backend, world = choose_backend(options)
    if backend == "cpu":
        build_module()
    with RankProcesses(world, _rank_main, options, backend, timeout_s=LIMIT_S) as ranks:
        outcomes = ranks.outcomes()
    values = [outcome.value if outcome.error is None else _died(rank, outcome.error) for rank, outcome in enumerate(outcomes)]
    return merge(checked(values, debug=options.debug))


def _died(rank: int, error: str) -> Failure:
    """Of a rank that handed nothing back. It tells no time: it was first, the others failed for its sake."""
    return Failure(rank, float("-inf"), (error.strip().splitlines() or ["no message"])[-1], error)


def _rank_main(rank: int, world: int, options: Options, backend: str) -> Any:
    from moe_tk.trace.record import record_points

    if backend == "cuda":
        import torch

        torch.cuda.set_device(rank)
    return record_points(rank, world, options, backend)


def _join(options: Options) -> list[Trace] | None:
    import torch
    import torch.distributed as dist

    from moe_tk.trace.record import record_points

    backend, _ = choose_backend(replace(options, world=None)) if options.backend != "cpu" else ("cpu", 0)
    ours = not dist.is_initialized()
    if backend == "cuda":
        torch.cuda.set_device(dist.get_node_local_rank(fallback_rank=0) % torch.cuda.device_count())
    if ours:
        dist.init_process_group(GROUP if backend == "cuda" else "gloo", timeout=timedelta(seconds=LIMIT_S))
    try:
        rank, world = dist.get_rank(), dist.get_world_size()
        if options.world not in (None, world):
            raise ArgumentError(f"--world is {options.world}, but {world} ranks were started: leave it out")
        mine = record_points(rank, world, options, backend)
        values: list[Any] | None = [None] * world if rank == 0 else None
        dist.gather_object(mine, values, dst=0, group=dist.new_group(backend="gloo"))
        return None if values is None else merge(checked(values, debug=options.debug))
    finally:
        if ours:
            dist.destroy_process_group()


def merge(values: list[list[tuple]]) -> list[Trace]:
    """Per point a trace of all ranks, from record_points() of each rank: with the offsets that rank 0 measured."""
    traces = []
    for point in zip(*values, strict=True):
        offsets = point[0][1]
        ranks = [point[0][0]]
        for rank, (laps, _) in enumerate(point[1:], start=1):
            ranks.append(replace(laps, offset_ns=offsets[rank].offset_ns, offset_error_ns=offsets[rank].error_ns))
        traces.append(Trace(tuple(ranks), dict(ranks[0].call)))
    return traces
