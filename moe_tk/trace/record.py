"""What a rank does: makes a layer, calls it a few times, and hands back the laps of the last call."""

from __future__ import annotations

import statistics
import time
import traceback
from typing import Any

import numpy as np
import torch

from moe_tk.demo.records import Failure
from moe_tk.layer import MoELayer
from moe_tk.schedule import local_experts, make_routing, shard_range
from moe_tk.trace.clocks import Offset, between, offset_of
from moe_tk.trace.decode import decode
from moe_tk.trace.kinds import CPU_PHASES
from moe_tk.trace.model import Laps, RankTrace
from moe_tk.trace.options import Options, Point

LIMIT_S = 60.0
WARM_UP, TIMED, IN_A_ROW = 3, 10, 3
Recorded = tuple[RankTrace, dict[int, Offset]]  # offsets of all ranks, on rank 0 only
CPU_KERNELS = {"two_kernel": ("gather_gemm", "gemm_scatter"), "mega": ("mega",)}


def record_points(rank: int, world: int, options: Options, backend: str) -> list[Recorded] | Failure:
    """The laps of every point, in order, or what this rank failed with. A collective of the default group."""
    try:
        record = record_gpu if backend == "cuda" else record_cpu
        return [record(rank, world, point, options) for point in options.points]
    except Exception as error:
        return Failure(rank, time.monotonic(), f"{type(error).__name__}: {error}", traceback.format_exc())


def _inputs(rank: int, world: int, point: Point, options: Options, device: torch.device) -> tuple[torch.Tensor, ...]:
    """hidden [T, H], ids [T, k], routing weights [T, k] of this rank, w13 and w2 of its experts or columns: random, but for ids."""
    sizes = point.sizes
    draw = torch.Generator(device=device).manual_seed(options.seed * 1000 + rank)
    routing = make_routing(options.routing, world * point.tokens, sizes["num_experts"], sizes["top_k"], world=world,
                           seed=options.seed)
    mine = slice(rank * point.tokens, (rank + 1) * point.tokens)
    experts = local_experts(sizes["num_experts"], world, rank, point.mode)[1]
    inter = sizes["intermediate_size"] if point.mode == "ep" else shard_range(sizes["intermediate_size"], world, rank)[1]
    hidden = sizes["hidden_size"]

    def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(*shape, device=device, dtype=torch.bfloat16, generator=draw) * scale)

    return (normal(point.tokens, hidden), routing.topk_ids[mine].to(device), routing.topk_weights[mine].to(device),
            normal(experts, 2 * inter, hidden, scale=hidden**-0.5), normal(experts, hidden, inter, scale=inter**-0.5))


def _facts(world: int, point: Point, options: Options) -> dict[str, Any]:
    return {"shape": point.shape.name, "mode": point.mode, "tokens_per_rank": point.tokens, "routing": options.routing,
            "world": world}


def record_gpu(rank: int, world: int, point: Point, options: Options) -> Recorded:
    """Calls back to back on this rank's current device; the last one is traced between two comparisons of the clocks."""
    device = torch.device("cuda", torch.cuda.current_device())
    layer = MoELayer(**point.sizes, max_tokens_per_rank=point.tokens, mode=point.mode, pattern="two_kernel", protocol="nvlink",
                     device=device, traced=True, timeout_s=LIMIT_S)
    *args, w13, w2 = _inputs(rank, world, point, options, device)
    layer.load_weights(w13, w2)
    del w13, w2
    out = torch.empty_like(args[0])
    stamps, group = layer.session.stamps, layer.group
    for _ in range(WARM_UP):
        layer(*args, out=out)
    layer.synchronize()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(TIMED)]
    for before, after in events:
        before.record()
        layer(*args, out=out)
        after.record()
    layer.synchronize()
    us = statistics.median(before.elapsed_time(after) for before, after in events) * 1e3
    first = stamps.compare_clocks(timeout_s=LIMIT_S)
    group.gather(None, timeout_s=LIMIT_S, step="trace: begin")
    for _ in range(IN_A_ROW):
        layer(*args, out=out)
    layer.synchronize()
    second = stamps.compare_clocks(timeout_s=LIMIT_S)
    if not bool(torch.isfinite(out).all()):
        raise RuntimeError("the traced call's result is not finite")
    headers, records = stamps.read()
    call = {**_facts(world, point, options), "backend": "cuda", "traced_call_us": round(us, 1),
            "gpu": torch.cuda.get_device_name(device)}
    offsets = {peer: between(offset_of(first[peer]), offset_of(second[peer])) for peer in first}
    return decode(headers, records, rank=rank, call=call), offsets


def record_cpu(rank: int, world: int, point: Point, options: Options) -> Recorded:
    """The same on the CPU back end, whose ranks share one clock."""
    torch.set_num_threads(1)
    layer = MoELayer(**point.sizes, max_tokens_per_rank=point.tokens, mode=point.mode, pattern="two_kernel", protocol="shm",
                     timeout_s=LIMIT_S)
    *args, w13, w2 = _inputs(rank, world, point, options, torch.device("cpu"))
    layer.load_weights(w13, w2)
    layer(*args)
    layer.record_trace = True
    layer.group.gather(None, timeout_s=LIMIT_S, step="trace: begin")
    begin = time.monotonic_ns()
    layer(*args)
    us = (time.monotonic_ns() - begin) / 1e3
    call = {**_facts(world, point, options), "backend": "cpu", "traced_call_us": round(us, 1)}
    trace = laps_of_events(rank, layer.stats.trace, CPU_KERNELS["two_kernel"], call)
    return trace, {peer: Offset(0.0, 0.0) for peer in range(1, world)}


def laps_of_events(rank: int, events: list[tuple], kernels: tuple[str, ...], call: dict[str, Any]) -> RankTrace:
    """A rank's trace from CallStats.trace: each event is a lap of waiting, if it waited, and one of work."""
    origin = min((event[4] for event in events), default=0)
    rows: list[tuple] = []
    begun: dict[tuple[int, int], float] = {}
    for launch, block, phase, item, begin, ready, end in sorted(events, key=lambda event: (event[0], event[1], event[4])):
        kind = 1 + CPU_PHASES.index(phase)
        begun.setdefault((launch, block), float(begin - origin))
        if ready > begin:
            rows.append((launch, block, 0, kind + len(CPU_PHASES), item, begin - origin, ready - origin))
        rows.append((launch, block, 0, kind, item, ready - origin, end - origin))
    columns = np.array(rows, dtype=np.float64).reshape(-1, 7).T
    laps = Laps(*(column.astype(np.int64) for column in columns[:5]), columns[5], columns[6])
    return RankTrace(rank=rank, backend="cpu", kernels=kernels, laps=laps, origin_ns=origin, call=call,
                     blocks_begun=np.array([(*place, at) for place, at in begun.items()], dtype=np.float64).reshape(-1, 3))
