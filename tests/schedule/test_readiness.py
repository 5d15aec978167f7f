"""The readiness collapse is visible on the real routing, and segments cure it."""

from __future__ import annotations

import json

import pytest
import torch

from moe_tk.errors import ArgumentError
from moe_tk.schedule import (
    build_padded,
    build_tables,
    check_tables,
    flame_routing,
    make_routing,
    readiness,
    trace_routing,
    trim,
)

ROW_BLOCK, COLS = 128, 16


def report(ids, world, mode, segments, rank=0, row_block=ROW_BLOCK):
    tables = build_tables(ids, token_counts=[ids.shape[0] // world] * world, world=world, rank=rank, num_experts=64,
                          mode=mode, row_block=row_block, segments=segments)
    return readiness(tables, COLS)


def test_by_hand():
    """One rank, two experts, blocks of 2, one column. Slots: expert 0: tokens 0, 3; expert 1: tokens 0, 1, 2, 3."""
    ids = torch.tensor([[0, 1], [1, -1], [1, -1], [0, 1]])
    tables = build_tables(ids, token_counts=[4], world=1, rank=0, num_experts=2, mode="ep", row_block=2)
    seen = readiness(tables, 1)
    assert tables.delivery_order.tolist() == [0, 3, 1, 2] and tables.job_order.tolist() == [0, 1, 2, 3]
    # arrival: block 0 after rows 0, 3; block 1 (rows 0, 1) after 3 of 4; block 2 (rows 2, 3) after all
    assert (seen.blocks_50, seen.blocks_90) == (0.75, 1.0)
    # token order 0, 1, 2, 3: block 0 needs row 3, and the others wait behind it
    assert (seen.blocks_50_token_order, seen.blocks_90_token_order) == (1.0, 1.0)
    # jobs 0 and 1 end with block 1 (2 of 3 tasks), jobs 2 and 3 with block 2
    assert (seen.jobs_50, seen.jobs_90) == (2 / 3, 1.0)
    # block 0 starts at 0.5, the others right behind it; token order: block 0 starts at 1.0
    assert seen.gather_time == pytest.approx(1.5) and seen.gather_time_token_order == pytest.approx(2.0)
    # jobs 0..3 start at 2/3 at the earliest and take 1/4 each
    assert seen.push_time == pytest.approx(2 / 3 + 1)
    assert seen.padding_share == 0 and (seen.num_jobs, seen.num_blocks, seen.num_tasks) == (4, 3, 3)


@pytest.mark.parametrize("layer", range(4))
@pytest.mark.parametrize("world, mode, collapsed", [(1, "ep", 0.85), (2, "ep", 0.80), (4, "tp", 0.85)])
def test_collapse_on_the_real_routing_and_its_cure(layer, world, mode, collapsed):
    ids = trace_routing(layer).topk_ids
    one = report(ids, world, mode, 1)
    assert one.jobs_50 > collapsed, "half of the jobs become ready only in the last part of the GEMM"
    assert one.push_time > 1.4, "so their way back cannot be hidden"
    assert one.blocks_50_token_order > 0.99, "rows in token order: nearly all must come before half of the GEMM may run"
    assert one.gather_time < one.gather_time_token_order and one.gather_time_token_order > 1.9
    times = [one.push_time]
    for segments in (2, 4, 8):
        cured = report(ids, world, mode, segments)
        times.append(cured.push_time)
    assert cured.jobs_50 < 0.60
    assert times == sorted(times, reverse=True) and times[-1] < 1.15
    assert cured.gather_time < 1.2


def test_each_segment_is_a_step_of_the_staircase():
    """With S segments, s / S of the jobs are ready when s / S of the GEMM is done (balanced load, no padding)."""
    ids = make_routing("balanced", 4096, 64, 8).topk_ids
    for segments in (1, 2, 4):
        tables = build_tables(ids, token_counts=[4096], world=1, rank=0, num_experts=64, mode="ep", row_block=16,
                              segments=segments)
        assert tables.num_slots == 4096 * 8
        position = tables.slots[tables.job_order.long()].amax(1) / tables.num_slots
        for step in range(1, segments + 1):
            done = int((position < step / segments).sum())
            assert done == 4096 * step // segments


def test_tables_of_the_real_routings_are_right():
    """Full size, golden rules: 16384 tokens of the trace on 4 ranks, and FLAME-MoE on 2."""
    for ids, world in ((trace_routing(1).topk_ids, 4), (flame_routing(3).topk_ids, 2)):
        tables = build_tables(ids, token_counts=[ids.shape[0] // world] * world, world=world, rank=1, num_experts=64,
                              mode="ep", row_block=64, segments=4)
        check_tables(tables, ids)


def test_nothing_to_get_ready():
    ids = torch.full((8, 2), -1)
    tables = build_tables(ids, token_counts=[4, 4], world=2, rank=0, num_experts=4, mode="ep", row_block=4)
    seen = readiness(tables, 3)
    assert seen.num_jobs == seen.num_blocks == seen.num_tasks == 0 and seen.jobs_50 is None and seen.push_time is None
    assert "none" in str(seen)
    empty = build_tables(ids[:0], token_counts=[0, 0], world=2, rank=0, num_experts=4, mode="ep", row_block=4)
    assert readiness(empty, 3).blocks_90 is None


def test_tables_at_capacity_length_are_refused():
    padded = build_padded(torch.zeros(8, 2, dtype=torch.int32), torch.tensor([4, 3]), world=2, rank=0, num_experts=4,
                          mode="ep", row_block=4)
    with pytest.raises(ArgumentError, match="trim"):
        readiness(padded.tables, 3)
    assert readiness(trim(padded), 3).num_jobs == 7


def test_printable_and_json_able():
    seen = report(trace_routing(2).topk_ids, 2, "ep", 4)
    assert json.loads(json.dumps(seen.to_dict())) == seen.to_dict()
    text = str(seen)
    assert "segments=4" in text and f"{100 * seen.jobs_50:.1f} %" in text and f"take {seen.push_time:.2f}" in text
