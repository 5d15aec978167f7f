"""Where the time of a fused call goes: the call against its GEMMs alone and its communication alone.

All from launches of the same kernels:
- GEMM alone: after a whole call all rows have come, all counters are full and all dispensers used up, so that gather_gemm and
  gemm_scatter launched again only multiply. Bringing rows together is part of it: that is how gather_gemm loads them.
- Communication alone: between open_call and gemm_scatter the task counts are set to zero and the counters of finished tiles to
  full, so that rows are sent and combined, and nobody multiplies.
- Plain GEMM: the engine's own kernel on as many rows, which lie in slots, with its registers and stages. What the fused kernels
  take more is the SM tax: of GEMM 1 for rows that two warps gather, of GEMM 2 for the registers of those who combine.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moe_tk.bench.contender import NotAvailable
from moe_tk.bench.lines import capture
from moe_tk.bench.ours import Ours
from moe_tk.bench.problem import Batch
from moe_tk.bench.ranks import Ranks
from moe_tk.bench.timing import Clock, Entry, slower_rank, summary, take_turns
from moe_tk.errors import MoETkError
from moe_tk.planner.accounts import ceiling, overlap
from moe_tk.runtime.nvlink_session import GATHER, OPEN, SCATTER

ALL = OPEN | GATHER | SCATTER
FULL = 1 << 20  # more column blocks than any GEMM has
OPEN_CLUSTER = 8  # blocks of a cluster of open_call: tables.cuh
TASK_COUNTS = slice(3, 5)  # of the table "counts": tiles of GEMM 1 and GEMM 2


@dataclass(frozen=True)
class Times:
    """Microseconds of a call on the slower rank. The plain GEMMs are NaN where they could not be timed."""

    fused: float         # whole call
    open: float          # exchange, tables, rows sent to those who want them
    open_gather: float   # ... and GEMM 1
    gemm1: float         # in the fused kernels, nothing to wait for
    gemm2: float
    cleared: float       # open_call and the clearing of the task counts
    communicate: float   # ... and combine and reduce, without tiles
    plain1: float = math.nan
    plain2: float = math.nan


def account(t: Times) -> dict[str, float]:
    """The split of docs/benchmarks.md; microseconds, and ratios without unit.

    fused = compute + exposed_front + exposed_back.
    """
    compute, clearing = t.gemm1 + t.gemm2, max(0.0, t.cleared - t.open)
    communicate = max(0.0, t.communicate - clearing)
    values = {
        "fused_us": t.fused, "compute_us": compute, "gemm1_us": t.gemm1, "gemm2_us": t.gemm2, "communicate_us": communicate,
        "open_us": t.open, "combine_us": max(0.0, t.communicate - t.cleared),
        "exposed_us": t.fused - compute, "exposed_front_us": t.open_gather - t.gemm1,
        "exposed_back_us": t.fused - t.open_gather - t.gemm2, "plain_gemm1_us": t.plain1, "plain_gemm2_us": t.plain2,
        "gather_tax_us": t.gemm1 - t.plain1, "combine_tax_us": t.gemm2 - t.plain2,
        "sm_tax_us": compute - t.plain1 - t.plain2, "sm_tax": compute / (t.plain1 + t.plain2) - 1,
        "overlap": overlap(compute, communicate, t.fused), "ceiling": ceiling(compute, communicate),
        "interference": (t.fused - t.open) / compute if compute else math.nan}  # waits included: launches cannot tell them apart
    return {name: round(value, 3) for name, value in values.items() if not math.isnan(value)}


class Stages:
    """Launches of parts of one fused call, on one batch."""

    def __init__(self, contender: Ours, batch: Batch) -> None:
        layer = contender.layer
        if not hasattr(getattr(layer, "_calls", None), "forward") or contender.name == "serial":
            raise NotAvailable(f"pattern {contender.name} has no stages to take apart")
        self.layer, self.calls, self.batch = layer, layer._calls, batch
        self.out = torch.empty_like(batch.hidden)
        self.local = layer.session.workspace.local

    def launch(self, stages: int) -> None:
        batch = self.batch
        self.calls.forward(batch.hidden, batch.ids, batch.weights, self.out, signature=1, stages=stages)

    def without_tiles(self, stages: int) -> None:
        """open_call, then a launch of SCATTER, if it is given, with nothing to multiply."""
        self.launch(OPEN)
        self.local("counts")[TASK_COUNTS].zero_()
        self.local("l2_done").fill_(FULL)
        if stages:
            self.launch(stages)


def entries_of(stages: Stages, calls: int) -> dict[str, Entry]:
    """What is timed, by the fields of Times; `calls` in a graph."""
    def graph(body: Any, before: Any = None) -> Entry:
        body()
        return Entry(capture(body, calls).replay, calls, before, keep=body)

    whole = lambda: stages.launch(ALL)  # noqa: E731  leaves full counters and the tables behind
    entries = {
        "fused": graph(whole), "open": graph(lambda: stages.launch(OPEN)),
        "open_gather": graph(lambda: stages.launch(OPEN | GATHER)), "cleared": graph(lambda: stages.without_tiles(0)),
        "communicate": graph(lambda: stages.without_tiles(SCATTER))}
    whole()
    entries["gemm1"] = graph(lambda: stages.launch(GATHER), before=whole)
    entries["gemm2"] = graph(lambda: stages.launch(SCATTER), before=whole)
    return entries


def row_major(weights: Tensor, rows: int, columns: int) -> Tensor:
    """[E, rows, columns] of weights in tiles [E, row tiles, column tiles, rows, columns]; those in rows stay as they are."""
    if weights.dim() == 3:
        return weights
    whole = weights.transpose(2, 3).reshape(weights.shape[0], weights.shape[1] * weights.shape[3], -1)
    return whole[:, :rows, :columns].contiguous()


def plain_entries(stages: Stages, calls: int) -> dict[str, Entry]:
    """The engine's GEMMs on this call's rows, `calls` in a graph. Raises MoETkError where they cannot run."""
    from moe_tk.runtime import gemm

    if stages.layer.dtype != torch.bfloat16:
        raise NotAvailable("the plain GEMM is compared in bfloat16 only")
    stages.launch(ALL)
    stages.layer.synchronize()
    experts, own = stages.layer.num_local_experts, stages.calls
    row_block = own.variant_of(stages.batch.tokens).row_block
    offsets, rows = stages.local("expert_offsets")[:experts + 1].clone(), stages.local("expert_load")[:experts].clone()
    slots = int(offsets[-1])
    if slots == 0:
        raise NotAvailable("no rows on this rank")
    hidden, inter = stages.layer.hidden_size, own.geometry.padded_intermediate
    w13, w2 = row_major(own.w13, 2 * inter, hidden), row_major(own.w2, hidden, inter)
    x = torch.randn(slots, hidden, device=offsets.device).bfloat16()
    act = torch.empty(slots, inter, dtype=x.dtype, device=x.device)
    form = {"alpha": own.activation.alpha, "beta": own.activation.beta, "limit": own.limit}
    make = lambda w, activation: gemm.make_plan(x.dtype, offsets, rows, num_slots=slots, columns=w.shape[1],  # noqa: E731
                                                row_block=row_block, activation=activation)
    first, second, out = make(w13, True), make(w2, False), torch.empty_like(x)
    bodies = {"plain1": lambda: gemm.launch(first, x, w13, act, swiglu=form),
              "plain2": lambda: gemm.launch(second, act, w2, out)}
    entries = {}
    for name, body in bodies.items():
        body()
        entries[name] = Entry(capture(body, calls).replay, calls, keep=body)
    return entries


def attribute(contender: Ours, batch: Batch, *, ranks: Ranks, clock: Clock, rounds: int, calls: int) -> dict[str, Any]:
    """The account of one line, or {"why": reason}. A collective."""
    def prepare() -> tuple[Stages, dict[str, Entry]]:
        stages = Stages(contender, batch)
        return stages, entries_of(stages, calls)

    prepared, why = ranks.failure(prepare, "attribution: prepare")
    if why:
        return {"why": why}
    stages, entries = prepared
    plain, no_plain = ranks.failure(lambda: plain_entries(stages, calls), "attribution: plain GEMM")
    medians = medians_of({**entries, **(plain or {})}, ranks, clock, rounds)
    try:
        stages.layer.synchronize()
    except MoETkError as error:
        return {"why": str(error)}
    found: dict[str, Any] = account(Times(**medians))
    return {**found, "no_plain_gemm": no_plain} if no_plain else found


def medians_of(entries: dict[str, Entry], ranks: Ranks, clock: Clock, rounds: int) -> dict[str, float]:
    """Median over rounds of the slower rank, by name."""
    samples = take_turns(clock, entries, rounds)
    return {name: summary(slower_rank(ranks.exchange(samples[name], f"attribution: {name}")))["median"] for name in entries}


def export_counts(num_sms: int) -> list[int]:
    """Numbers of blocks to try, in whole clusters: powers of two, and all but the cluster that builds the tables."""
    most = max(1, num_sms // OPEN_CLUSTER - 1)
    return [OPEN_CLUSTER * count for count in (*(1 << power for power in range(most.bit_length()) if 1 << power < most), most)]


def sweep_export(contender: Ours, batch: Batch, *, ranks: Ranks, clock: Clock, rounds: int, calls: int) -> dict[str, Any]:
    """Microseconds of the whole call, of open_call and of open + gather, by blocks of open_call that send rows."""
    def prepare() -> dict[str, Entry]:
        stages = Stages(contender, batch)
        if not hasattr(stages.calls, "export_blocks"):
            raise NotAvailable("this layer cannot choose how many blocks send rows")
        entries = {}
        for count in export_counts(stages.layer.session.num_sms):
            stages.calls.export_blocks = count
            for name, parts in (("fused", ALL), ("open", OPEN), ("open_gather", OPEN | GATHER)):
                body = partial(stages.launch, parts)
                body()
                entries[f"{name} {count}"] = Entry(capture(body, calls).replay, calls, keep=body)
        stages.calls.export_blocks = 0
        return entries

    entries, why = ranks.failure(prepare, "sweep: prepare")
    if why:
        return {"why": why}
    medians = medians_of(entries, ranks, clock, rounds)
    table: dict[str, Any] = {}
    for name, us in medians.items():
        kind, _, count = name.partition(" ")
        table.setdefault(kind, {})[int(count)] = us
    return {"export_blocks": table}
