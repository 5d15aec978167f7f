"""Starts a process for each rank, or joins those that torchrun has started, and gives the lines back."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

from moe_tk.bench.options import Options
from moe_tk.builder.build import build_cuda_module, build_host_module
from moe_tk.builder.native_root import native_modules
from moe_tk.demo.start import under_launcher
from moe_tk.errors import ArgumentError, BuildError
from moe_tk.runtime.launcher import RankFailure, RankProcesses

BACKENDS = {"cuda": "cpu:gloo,cuda:nccl", "cpu": "gloo"}
DEFAULT_CPU_WORLD = 2
Say = Callable[[str, Any], None]


def collect(options: Options, say: Say) -> list[dict[str, Any]] | None:
    """The lines; None on a rank that does not print. Raises RankFailure, ArgumentError, BuildError."""
    return join_ranks(options, say) if under_launcher() else start_ranks(options, say)


def build_modules(options: Options) -> None:
    """Builds what the run needs, before any rank waits for another."""
    wanted = {"moe_tk_host"} if options.backend == "cpu" else {"moe_tk_nvlink"} | ({"moe_tk_gemm"} if options.attribute else set())
    for module in native_modules():
        if module.name in wanted:
            with suppress(BuildError):  # whoever uses the module raises it again, with its text
                if module.kind == "host":
                    build_host_module(module.name, module.sources)
                else:
                    build_cuda_module(module.name, module.sources, arch="90a")


def number_of_ranks(options: Options) -> int:
    """Raises ArgumentError when there are not as many GPUs."""
    if options.backend == "cpu":
        return options.world or DEFAULT_CPU_WORLD
    import torch

    gpus = torch.cuda.device_count()
    if gpus == 0:
        raise ArgumentError("torch sees no GPU: --backend cpu measures the layer on the CPU back end")
    if options.world is not None and options.world > gpus:
        raise ArgumentError(f"--world is {options.world}, but torch sees {gpus} GPU{'s' * (gpus > 1)}: a rank needs one of its own")
    return options.world or gpus


def start_ranks(options: Options, say: Say) -> list[dict[str, Any]]:
    world = number_of_ranks(options)
    say("stage", "native modules")
    build_modules(options)
    say("stage", f"starting {world} rank{'s' * (world > 1)}")
    devices = range(world) if options.backend == "cuda" else None
    receive, send = multiprocessing.get_context("forkserver").Pipe(duplex=False)
    with RankProcesses(world, _rank_main, options, send, timeout_s=options.limit_s, devices=devices) as ranks:
        send.close()
        listener = threading.Thread(target=_listen, args=(receive, say), daemon=True)
        listener.start()
        outcomes = ranks.outcomes()
        listener.join(5)
    return _lines([outcome.value if outcome.error is None else _last_line(outcome.error) for outcome in outcomes])


def _rank_main(rank: int, world: int, options: Options, send: Any) -> Any:
    from moe_tk.bench.run import rank_main

    return rank_main(rank, world, options, send)


def _listen(receive: Any, say: Say) -> None:
    while True:
        try:
            kind, what = receive.recv()
        except (EOFError, OSError):
            return
        with suppress(OSError):  # nobody reads our output any more: go on taking, or rank 0 would block
            say(kind, what)


def join_ranks(options: Options, say: Say) -> list[dict[str, Any]] | None:
    import torch.distributed as dist

    from moe_tk.bench.ranks import describe
    from moe_tk.bench.run import measure, own_device

    ours = not dist.is_initialized()
    if ours:
        own_device(options)  # before NCCL takes device 0
        dist.init_process_group(BACKENDS[options.backend], timeout=timedelta(seconds=options.limit_s))
    try:
        if options.world not in (None, dist.get_world_size()):
            raise ArgumentError(f"--world is {options.world}, but {dist.get_world_size()} ranks were started: leave it out")
        rank = dist.get_rank()
        build_modules(options)
        lines = measure(options, say if rank == 0 else lambda kind, what: None)
        return lines if rank == 0 else None
    except RuntimeError as error:  # of CUDA or NCCL: nothing on this rank can go on
        if options.debug:
            raise
        raise RankFailure(f"rank {dist.get_rank()} failed: {describe(error)}") from None
    finally:
        if ours:
            dist.destroy_process_group()


def _lines(values: list[Any]) -> list[dict[str, Any]]:
    failed = [(rank, value) for rank, value in enumerate(values) if isinstance(value, str)]
    if failed:
        raise RankFailure("; ".join(f"rank {rank} failed: {text}" for rank, text in failed))
    return values[0]


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["no message"])[-1]
