"""Numbers of a trace: how long each kernel took, who waited, who worked, what the tail is. JSON-able, us unless said."""

from __future__ import annotations

from typing import Any

import numpy as np

from moe_tk.trace.kinds import CONSUMERS, CPU_KINDS, GPU_KERNELS, GPU_KINDS, LOADER, LOADERS, kind_number
from moe_tk.trace.model import Laps, RankTrace, Trace

OPEN, GATHER, SCATTER = range(3)
OPEN_PHASES = tuple(range(kind_number("send routing"), kind_number("write tasks") + 1))


def summarise(trace: Trace) -> dict[str, Any]:
    """What the call was, and a table per rank. Times are us since the first block of any rank began."""
    begin = trace.begin_ns
    ranks = [_rank_summary(rank, trace.shift(rank) - begin) for rank in trace.ranks]
    return {**trace.call, "span_us": _us(trace.end_ns - begin), "ranks": ranks}


def _rank_summary(rank: RankTrace, shift: float) -> dict[str, Any]:
    head = {"rank": rank.rank, "laps": len(rank.laps), "lost": rank.lost, "clock": rank.clock, "offset_ns": rank.offset_ns,
            "offset_error_ns": rank.offset_error_ns}
    if rank.backend != "cuda":
        return {**head, "kernels": {name: _plain(rank, index, shift) for index, name in enumerate(rank.kernels)}}
    parts = {"open_call": _open_call, "gather_gemm": _gather, "gemm_scatter": _scatter}
    kernels = {name: parts[name](rank, shift) for index, name in enumerate(GPU_KERNELS) if (rank.laps.kernel == index).any()}
    if "first_tile_begins_us" in kernels.get("gather_gemm", {}) and "open_call" in kernels:
        gather = kernels["gather_gemm"]
        gather["first_tile_after_open_us"] = _us_diff(gather["first_tile_begins_us"], kernels["open_call"]["end_us"])
    ends = [kernels[name] for name in GPU_KERNELS if name in kernels]
    gaps = [_us_diff(after["begin_us"], before["end_us"]) for before, after in zip(ends, ends[1:], strict=False)]
    return {**head, "kernels": kernels, "gaps_us": gaps}


def _us(ns: float) -> float:
    return round(float(ns) / 1e3, 2)


def _us_diff(a: float, b: float) -> float:
    return round(a - b, 2)


def _span(rank: RankTrace, kernel: int, shift: float) -> dict[str, float]:
    """Of a kernel: first and last block that began, last lap."""
    began = rank.blocks_begun[rank.blocks_begun[:, 0] == kernel, 2] + shift
    end = rank.laps.end[rank.laps.kernel == kernel].max() + shift
    return {"blocks": len(began), "begin_us": _us(began.min()), "last_block_begins_us": _us(began.max()), "end_us": _us(end),
            "span_us": _us(end - began.min())}


def _plain(rank: RankTrace, kernel: int, shift: float) -> dict[str, Any]:
    """Of the CPU back end: time by kind, summed over blocks."""
    mine = rank.laps.where(rank.laps.kernel == kernel)
    if not len(mine):
        return {}
    return {**_span(rank, kernel, shift), "sum_us": {CPU_KINDS[kind].name: _us((mine.end - mine.begin)[mine.kind == kind].sum())
                                                    for kind in np.unique(mine.kind)}}


def _open_call(rank: RankTrace, shift: float) -> dict[str, Any]:
    mine = rank.laps.where(rank.laps.kernel == OPEN)
    phases = {}
    for kind in OPEN_PHASES:
        chosen = mine.kind == kind
        if chosen.any():
            took = (mine.end - mine.begin)[chosen]
            phases[GPU_KINDS[kind].name] = {"mean_us": _us(took.mean()), "most_us": _us(took.max()),
                                            "ends_us": _us(mine.end[chosen].max() + shift)}
    export, rows = (mine.where(mine.kind == kind_number(name)) for name in ("export rows", "wait for rows"))
    found = {**_span(rank, OPEN, shift), "phases": phases}
    if len(export):
        found["export"] = {"mean_us": _us((export.end - export.begin).mean()), "ends_us": _us(export.end.max() + shift)}
    if len(rows):  # one block's: the last to have sent
        found["wait_for_rows"] = {"us": _us((rows.end - rows.begin).sum()), "ends_us": _us(rows.end.max() + shift)}
    return found


def _gemm(rank: RankTrace, kernel: int, shift: float) -> tuple[Laps, dict[str, Any]]:
    """What both GEMMs have: shares are of the kernel's span, over all loaders and all consumer warpgroups."""
    mine = rank.laps.where(rank.laps.kernel == kernel)
    found = _span(rank, kernel, shift)
    span_ns, blocks = found["span_us"] * 1e3, found["blocks"]

    def share(name: str, lanes: int) -> float:
        chosen = mine.kind == kind_number(name)
        return round(float((mine.end - mine.begin)[chosen].sum()) / max(1.0, span_ns * lanes), 4)

    tiles = mine.where(np.isin(mine.writer, CONSUMERS) & np.isin(mine.kind, [kind_number("multiply"), kind_number("emit")]))
    if len(tiles):
        last = np.zeros((blocks, max(CONSUMERS) + 1))
        blocks_of = np.unique(tiles.block, return_inverse=True)[1]
        np.maximum.at(last, (blocks_of, tiles.writer), tiles.end)
        ends = last[last > 0] + shift
        multiply = tiles.where(tiles.kind == kind_number("multiply"))
        found |= {"tiles": len(multiply), "first_tile_begins_us": _us(tiles.begin.min() + shift),
                  "first_consumer_ends_us": _us(ends.min()), "last_consumer_ends_us": _us(ends.max()),
                  "tail_us": _us(ends.max() - ends.min()),
                  "idle_in_tail": round(float((ends.max() - ends).mean() / max(1.0, span_ns)), 4),
                  "tile_multiply_us": _quantiles(multiply.end - multiply.begin)}
    lanes, loaders = consumers_of(mine) * blocks, len(LOADERS[GPU_KERNELS[kernel]]) * blocks
    found |= {"loaders_load_weights": share("load weights", loaders), "loaders_load": share("load", loaders),
              "consumers_multiply": share("multiply", lanes), "consumers_emit": share("emit", lanes),
              "consumers_wait_for_inputs": share("wait for inputs", lanes), "storers_push": share("push", lanes)}
    return mine, found


def consumers_of(laps: Laps) -> int:
    """Consumer warpgroups of a block: those that have written anything."""
    return int(np.isin(CONSUMERS, laps.writer).sum())


def _quantiles(ns: np.ndarray) -> dict[str, float]:
    if not len(ns):
        return {}
    low, middle, high, most = np.quantile(ns, [0.1, 0.5, 0.9, 1.0])
    return {"p10": _us(low), "p50": _us(middle), "p90": _us(high), "max": _us(most)}


def _gather(rank: RankTrace, shift: float) -> dict[str, Any]:
    mine, found = _gemm(rank, GATHER, shift)
    ahead = mine.where((mine.kind == kind_number("load weights")) & (mine.writer == LOADER))
    if len(ahead):  # one of each block that has a tile
        found |= {"load_weights_us": _quantiles(ahead.end - ahead.begin), **_three("weights_asked_for", ahead.end + shift)}
    return found


def _three(name: str, ns: np.ndarray) -> dict[str, float]:
    """When the first, half and the last of some moments have come."""
    return {f"first_{name}_us": _us(ns.min()), f"half_{name}_us": _us(np.median(ns)), f"last_{name}_us": _us(ns.max())}


def _scatter(rank: RankTrace, shift: float) -> dict[str, Any]:
    mine, found = _gemm(rank, SCATTER, shift)
    gates = mine.where(mine.kind == kind_number("gate"))  # of the one loader of a block
    found["loaders_at_gate"] = round(float((gates.end - gates.begin).sum()) / max(1.0, found["span_us"] * 1e3 * found["blocks"]), 4)
    last_tile = found.get("last_consumer_ends_us")
    for what, wait, work in (("jobs", "wait for jobs", "combine"), ("tokens", "wait for partial rows", "reduce")):
        ready, done = (mine.where(mine.kind == kind_number(name)) for name in (wait, work))
        if not len(done):
            continue
        work_ns, wait_ns = done.end - done.begin, ready.end - ready.begin
        found[what] = {"count": len(done), **_three("ready", ready.end + shift), **_three("done", done.end + shift),
                       "work_us": _quantiles(work_ns), "wait_us": _quantiles(wait_ns), "warp_us_of_work": _us(work_ns.sum()),
                       "warp_us_of_waiting": _us(wait_ns.sum())}
        if last_tile is not None:
            found[what]["done_before_last_tile"] = round(float(((done.end + shift) / 1e3 < last_tile).mean()), 4)
    if last_tile is not None:
        found["after_last_tile_us"] = _us_diff(found["end_us"], last_tile)
    return found
