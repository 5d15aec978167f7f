"""Task orders: golden and vectorised agree, every tile once, in the promised order."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_tk.errors import ArgumentError, ScheduleError
from moe_tk.schedule import build_tables, mega_order, task_order
from moe_tk.schedule.golden import mega_order_golden, task_order_golden
from moe_tk.schedule.orders import SUPERTILE

from .cases import cases

SOME = settings(max_examples=100, deadline=None)


@SOME
@given(cases(), st.integers(1, 5), st.integers(1, 4), st.integers(1, 2))
def test_task_order(case, num_cols, passes, per_step):
    padded = case.padded(case.world - 1)
    tables = case.build(case.world - 1)
    order = task_order(tables, num_cols, passes, per_step)
    assert order.dtype == torch.int32
    assert torch.equal(order, task_order_golden(tables, num_cols, passes, per_step))
    group = order[:, 0] * tables.num_local_experts + order[:, 1]
    cut = ((order[:, 3] // per_step + 1) * passes - 1) // -(-num_cols // per_step)
    walk = (order[:, 0] * passes + cut) * tables.num_local_experts + order[:, 1]
    assert bool((walk.diff() >= 0).all()), "a segment, in it a pass, in it an expert, ends before the next begins"
    tiles = order[:, 2].long() * num_cols + order[:, 3]
    assert torch.equal(tiles.sort().values, torch.arange(tables.num_blocks * num_cols)), "each tile exactly once"
    assert torch.equal(group, tables.block_group[order[:, 2].long()])
    at_capacity = task_order(padded.tables, num_cols, passes, per_step)
    assert torch.equal(at_capacity[: len(order)], order) and bool((at_capacity[len(order):] == -1).all())


def test_task_order_walks_supertiles_by_column():
    """One expert with 11 row blocks: 8 blocks share each column block, then the other 3; every second column upwards."""
    tables = build_tables(torch.zeros(22, 1, dtype=torch.int32), token_counts=[22], world=1, rank=0, num_experts=1,
                          mode="ep", row_block=2)
    walked = [(row, col) for _, _, row, col in task_order(tables, 2).tolist()]
    assert SUPERTILE == 8
    assert walked == [*((r, 0) for r in range(8)), *((r, 1) for r in range(7, -1, -1)),
                      (8, 0), (9, 0), (10, 0), (10, 1), (9, 1), (8, 1)]
    same = [a[0] == b[0] or a[1] == b[1] for a, b in zip(walked, walked[1:], strict=False)]
    assert same.count(False) == 1  # only from one supertile to the next


@SOME
@given(cases(max_tokens=17), st.integers(1, 4), st.integers(1, 4), st.sampled_from([1, 2, 3, 1000]))
def test_mega_order(case, l1_cols, l2_cols, warmup):
    padded, tables = case.padded(0), case.build(0)
    order = mega_order(tables, l1_cols, l2_cols, warmup)
    assert order.dtype == torch.int32
    assert torch.equal(order, mega_order_golden(tables, l1_cols, l2_cols, warmup))
    at_capacity = mega_order(padded.tables, l1_cols, l2_cols, warmup)
    assert torch.equal(at_capacity[: len(order)], order) and bool((at_capacity[len(order):] == -1).all())
    done, seen = [0] * tables.num_blocks, set()
    for phase, group, block, col in order.tolist():
        assert group == int(tables.block_group[block])
        assert (phase, block, col) not in seen
        seen.add((phase, block, col))
        if phase == 0:
            done[block] += 1
        else:  # what it reads is complete, and so are the next `warmup` blocks that exist
            assert all(n == l1_cols for n in done[block : block + warmup + 1])
    assert len(seen) == tables.num_blocks * (l1_cols + l2_cols)


def test_orders_refuse_what_cannot_work():
    tables = build_tables(torch.zeros(4, 1, dtype=torch.int32), token_counts=[4], world=1, rank=0, num_experts=1,
                          mode="ep", row_block=2)
    with pytest.raises(ScheduleError, match="warmup is 0, wanted an integer >= 1"):
        mega_order(tables, 1, 1, 0)
    with pytest.raises(ArgumentError, match="num_col_blocks must be an integer >= 1, got 0"):
        task_order(tables, 0)
    with pytest.raises(ArgumentError, match="passes"):
        task_order(tables, 1, 0)
    with pytest.raises(ScheduleError, match=r"number of tasks = 4294967296 does not fit the int32 tables"):
        task_order(tables, 2**31)
    with pytest.raises(ScheduleError, match="number of tasks"):
        mega_order(tables, 2**30, 2**30, 1)
