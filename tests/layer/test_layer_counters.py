"""What a layer tells about itself: loads, bytes, waits, trace, plan, memory; and MOE_TK_VALIDATE."""

from __future__ import annotations

import pytest
import torch
from backends import each_pattern, on_both, ranks_on
from layer_ranks import loads
from moe_cases import LayerCase, call, with_options

from moe_tk.errors import ArgumentError
from moe_tk.schedule import expert_range

CASE = LayerCase(((50,),), ("uniform",), max_tokens=64)


@pytest.mark.parametrize("mode", ["ep", "tp"])
@each_pattern("mega", "two_kernel", "serial", world=2)
def test_expert_load_counts_the_pairs_of_every_local_expert(run_ranks, backend, pattern, mode):
    """Over ranks with different T, skipped and duplicate ids: exactly the valid pairs."""
    world = ranks_on(backend, 3)
    case = LayerCase(((20, 0, 7),), ("half",), options=dict(pattern=pattern, mode=mode)).on(backend)
    ids = torch.cat([case.inputs(0, world, rank)[1] for rank in range(world)])
    wanted = [int((ids == expert).sum()) for expert in range(10)]
    for rank, load in enumerate(run_ranks(world, loads, case, 0, backend=backend)):
        first, count = expert_range(10, world, rank) if mode == "ep" else (0, 10)
        assert load == wanted[first:first + count]


@on_both
def test_expert_load_adds_up_and_is_reset(backend, nothing_left):
    case = CASE.on(backend)
    layer = case.layer()
    inputs = case.inputs(0, 1, 0)
    call(layer, *inputs)
    once = layer.expert_load.clone()
    call(layer, *inputs)
    assert layer.expert_load.equal(2 * once) and int(once.sum()) == 150 and layer.expert_load.dtype == torch.int64
    layer.reset_expert_load()
    assert int(layer.expert_load.sum()) == 0


@pytest.mark.parametrize("pattern, launches", [("mega", 1), ("two_kernel", 2), ("serial", 0)])
def test_stats_of_a_call(pattern, launches, nothing_left):
    """Number of launches, time by phase, and a trace that covers every item once when it is asked for. Of the CPU back end: kernels
    on GPUs count no time of their own."""
    layer = with_options(CASE, pattern=pattern).layer()
    layer.record_trace = True
    layer(*CASE.inputs(0, 1, 0))
    stats, tables = layer.stats, layer.tables
    assert stats.launches == launches
    if launches:
        items = {phase: [event[3] for event in stats.trace if event[2] == phase] for phase in ("dispatch", "combine", "reduce")}
        assert sorted(items["dispatch"]) == sorted(items["combine"]) == list(range(tables.num_jobs))
        assert sorted(items["reduce"]) == [0, 1]
        assert all(begin <= ready <= end for *_, begin, ready, end in stats.trace)
        assert set(stats.busy_s) >= {"dispatch", "gemm1", "gemm2", "combine", "reduce"}
    layer.record_trace = False
    layer(*CASE.inputs(0, 1, 0))
    assert layer.stats.trace == []


def test_plan_explains_every_choice(nothing_left):
    layer = CASE.layer()
    text = layer.plan.explain()
    for word in ("pattern mega", "protocol shm", "segment", "row blocks of 32", "compute"):
        assert word in text
    assert len(layer.plan.reasons) == 4 and layer.memory.total == layer.session.workspace.allocated_bytes


def test_sch_08_validate_names_rank_token_slot_and_value(monkeypatch, nothing_left):
    """MOE_TK_VALIDATE=1: an id outside is refused instead of skipped; -1 is still "skip". Of the CPU back end: the host never looks
    at ids that are on a GPU."""
    layer = CASE.layer()
    hidden, ids, weights = CASE.inputs(0, 1, 0)
    ids[4, 2], ids[5, 0] = -1, 10
    layer(hidden, ids, weights)
    monkeypatch.setenv("MOE_TK_VALIDATE", "1")
    for value in (10, -2, 2**40):
        ids[5, 0] = value
        with pytest.raises(ArgumentError, match=rf"topk_ids\[5, 0\] is {value} on rank 0, wanted -1 \(skip\) or 0..9"):
            layer(hidden, ids, weights)
    ids[5, 0] = -1
    layer(hidden, ids, weights)
    monkeypatch.setenv("MOE_TK_VALIDATE", "maybe")
    with pytest.raises(ArgumentError, match="MOE_TK_VALIDATE='maybe' is not valid: wanted 0 . 1"):
        layer(hidden, ids, weights)


def test_validate_checks_the_tables_too(monkeypatch, nothing_left):
    from moe_tk.errors import ScheduleError
    from moe_tk.runtime import calls

    layer = CASE.layer()
    build = calls.build_tables

    def damaged(*arguments, **named):
        tables = build(*arguments, **named)
        tables.slots[3, 1] += 1
        return tables

    monkeypatch.setattr(calls, "build_tables", damaged)
    monkeypatch.setenv("MOE_TK_VALIDATE", "1")
    with pytest.raises(ScheduleError, match=r"slots\[3, 1\]"):
        layer(*CASE.inputs(0, 1, 0))
