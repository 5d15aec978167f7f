"""Worst-case sizes hold for every routing, are reached, and are exact 64-bit numbers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_tk.errors import ArgumentError, ScheduleError
from moe_tk.schedule import build_tables, flat_offset, max_segment_blocks, max_slots

from .cases import cases


@settings(max_examples=150, deadline=None)
@given(cases(experts=(1, 2, 3, 8, 30)))
def test_no_routing_needs_more(case):
    for rank in {0, case.world - 1}:
        tables = case.build(rank)
        sizes = (case.world, case.tokens, case.ids.shape[1], tables.num_local_experts, case.segments, case.row_block)
        assert tables.num_slots <= max_slots(*sizes)
        if tables.num_local_experts:
            segment = tables.block_group // tables.num_local_experts
            blocks = torch.bincount(segment, minlength=case.segments)
            assert int(blocks.max()) <= max_segment_blocks(*sizes)


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 4), st.integers(1, 12), st.integers(1, 5), st.integers(1, 9), st.integers(1, 9))
def test_the_bound_is_reached(world, tokens, top_k, experts, row_block):
    """One row in every group but the last, the rest there: no smaller capacity would do (segments = 1)."""
    pairs = world * tokens * top_k
    ids = torch.arange(pairs).clamp(max=experts - 1).reshape(world * tokens, top_k)
    tables = build_tables(ids, token_counts=[tokens] * world, world=world, rank=0, num_experts=experts, mode="tp",
                          row_block=row_block)
    assert tables.num_slots == max_slots(world, tokens, top_k, experts, 1, row_block)
    assert tables.num_blocks == max_segment_blocks(world, tokens, top_k, experts, 1, row_block)


def test_krn_01_krn_19_all_pairs_on_one_rank_or_one_expert_fit():
    """Dropless: every pair of 8 ranks on rank 0's experts, or all on its first or last one."""
    for ids in (torch.arange(8 * 32 * 4).reshape(-1, 4) % 4, torch.zeros(8 * 32, 4), torch.full((8 * 32, 4), 3)):
        tables = build_tables(ids.int(), token_counts=[32] * 8, world=8, rank=0, num_experts=32, mode="ep",
                              row_block=16)
        assert int(tables.expert_load.sum()) == int(tables.block_target.sum()) == 8 * 32 * 4
        assert tables.num_slots <= max_slots(8, 32, 4, 4, 1, 16)


def test_krn_02_a_rank_without_tokens_or_without_work():
    ids = torch.zeros(4 * 8, 2, dtype=torch.int32)
    for counts in ([8, 8, 0, 8], [0, 0, 0, 0]):
        for rank in range(4):
            tables = build_tables(ids, token_counts=counts, world=4, rank=rank, num_experts=4, mode="ep", row_block=4)
            assert tables.num_jobs == (sum(counts) if rank == 0 else 0)
            assert tables.expected.tolist() == (counts if rank == 0 else [0] * 4)
            assert int(tables.send_count.sum()) == counts[rank]


@pytest.mark.parametrize("tokens, world, top_k, hidden, last", [
    (37_450, 1, 8, 7168, 299_599 * 7168), (16_384, 8, 8, 7168, 1_048_575 * 7168),
    (1_525_202, 1, 1, 2816, 1_525_201 * 2816),
])
def test_sch_01_row_offsets_are_64_bit(tokens, world, top_k, hidden, last):
    """Tables hold indices that fit int32; the offset of the last row does not, and is right all the same."""
    rows = world * tokens * top_k
    assert max_slots(world, tokens, top_k, 8, 1, 128) >= rows
    last_row = torch.tensor([rows - 1], dtype=torch.int32)
    assert last > 2**31 and flat_offset(rows - 1, hidden) == last
    assert flat_offset(last_row, hidden).dtype == torch.int64 and int(flat_offset(last_row, hidden)) == last


def test_sch_01_the_last_pair_of_37450_tokens_has_its_slot():
    """The builder itself at that size: all pairs on one rank, the last one in the last slot."""
    tables = build_tables(torch.zeros(37_450, 8, dtype=torch.int32), token_counts=[37_450], world=1, rank=0,
                          num_experts=2, mode="ep", row_block=100)
    assert int(tables.slots[-1, -1]) == 299_599 and int(tables.slot_pair[-1]) == 299_599
    assert int(flat_offset(tables.slots, 7168)[-1, -1]) == 299_599 * 7168


@pytest.mark.parametrize("experts, rows, cols", [(512, 2048, 4096), (256, 2 * 2048, 7168)])
def test_sch_02_expert_offsets_are_64_bit(experts, rows, cols):
    """The last expert that the tables name, times the size of an expert's weights."""
    tables = build_tables(torch.tensor([[experts - 1]]), token_counts=[1], world=1, rank=0, num_experts=experts,
                          mode="ep", row_block=4)
    expert = tables.block_group[-1:] % tables.num_local_experts
    assert int(expert) == experts - 1
    wanted = (experts - 1) * rows * cols
    assert wanted > 2**31 and int(flat_offset(expert, rows * cols)) == wanted


def test_counts_that_do_not_fit_int32_raise_at_plan_time():
    fits = (8, 2**25 - 16, 8, 1, 1, 128)  # 2**31 - 1024 rows
    assert max_slots(*fits) == 2**31 - 1024
    with pytest.raises(ScheduleError, match=r"number of pairs .*= 2147483648 does not fit the int32 tables \(limit 2"):
        max_slots(8, 2**25, 8, 1, 1, 128)
    with pytest.raises(ScheduleError, match="number of padded slots"):
        max_slots(8, 2**25 - 16, 8, 64, 1, 128)
    with pytest.raises(ScheduleError, match="number of groups"):
        max_slots(1, 1, 1, 2**20, 2**11, 1)
    with pytest.raises(ScheduleError, match="number of pairs"):
        max_segment_blocks(8, 2**25, 8, 1, 8, 128)


@pytest.mark.parametrize("change, message", [
    (dict(world=0), "world must be an integer >= 1, got 0"), (dict(world=64), "world must be in 1..63, got 64"),
    (dict(tokens_per_rank=-1), "tokens_per_rank must be an integer >= 0"), (dict(top_k=0), "top_k must be an integer"),
    (dict(row_block=0), "row_block must be"), (dict(segments=0), "segments must be"), (dict(row_block=1.5), "got 1.5"),
])
def test_sizes_are_checked(change, message):
    sizes = dict(world=2, tokens_per_rank=8, top_k=2, num_local_experts=4, segments=1, row_block=8)
    with pytest.raises(ArgumentError, match=message):
        max_slots(**{**sizes, **change})
