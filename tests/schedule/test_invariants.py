"""check_tables finds every corrupted table, and says which entry, what is there and what should be."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch

from moe_tk.errors import ArgumentError, ScheduleError
from moe_tk.schedule import Tables, build_tables, check_ids, check_tables

# Rank 1 of 2, 4 experts (2 and 3 here), row blocks of 2, two segments; token 1 of rank 0 repeats expert 2; rank 1's
# third row is masked. Groups: (segment 0, expert 2), (0, 3), (1, 2), (1, 3).
IDS = torch.tensor([[2, 3], [2, 2], [0, 3], [3, 2], [-1, 2], [3, 3]], dtype=torch.int32)
ARGUMENTS = dict(token_counts=[3, 2], world=2, rank=1, num_experts=4, mode="ep", row_block=2, segments=2, job_chunk=2)


@pytest.fixture
def tables() -> Tables:
    made = build_tables(IDS, impl="golden", **ARGUMENTS)
    check_tables(made, IDS)
    return made


def corrupt(tables: Tables, name: str, index: int | tuple[int, ...], value: int) -> Tables:
    table = getattr(tables, name).clone()
    table[index] = value
    return replace(tables, **{name: table})


def test_the_tables_that_are_corrupted_below(tables):
    assert tables.expert_offsets.tolist() == [0, 4, 6, 8, 10]
    assert tables.slots.tolist() == [[0, 4], [1, 2], [-1, 8], [5, 3], [-1, 6], [-1, -1]]
    assert tables.slot_pair.tolist() == [0, 2, 3, 7, 1, 6, 9, -1, 5, -1]
    assert tables.block_group.tolist() == [0, 0, 1, 2, 3]
    assert tables.block_target.tolist() == [2, 2, 2, 1, 1]
    assert tables.delivery_order.tolist() == [0, 1, 3, 4, 2]
    assert tables.job_order.tolist() == [1, 0, 3, 4, 2]
    assert tables.chunk_expected.tolist() == [[2, 1], [2, 0]]
    assert tables.send_order.tolist() == [[-1, -1, -1], [0, 1, -1]]
    assert tables.contributors.tolist() == [2, 2, 0]


CORRUPTIONS = [
    ("token_counts", 0, 4, r"token_counts\[0\] is 4, wanted 0..3"),
    ("expert_load", 1, 9, r"expert_load\[1\] is 9, wanted 3"),
    ("expert_offsets", 0, 2, r"expert_offsets\[0\] is 2, wanted 0"),
    ("expert_offsets", 2, 7, r"expert_offsets\[2\] is 7, wanted a multiple of 2"),
    ("expert_offsets", 2, 8, r"expert_offsets\[2\] is 8, wanted 6: group 1 starts at 4 and has 2 rows"),
    ("expert_offsets", 4, 12, r"expert_offsets\[4\] is 12, wanted 10"),
    ("slots", (2, 0), 9, r"slots\[2, 0\] is 9, wanted -1: .*not here"),
    ("slots", (5, 1), 9, r"slots\[5, 1\] is 9, wanted -1: .*masked"),
    ("slots", (0, 1), -1, r"slots\[0, 1\] is -1, wanted 4..5: the rows of group 1"),
    ("slots", (2, 1), 9, r"slots\[2, 1\] is 9, wanted 8..8: the rows of group 3"),
    ("slots", (1, 0), 0, r"slots\[1, 0\] is 0, wanted a slot above 0: unique and ascending"),
    ("slots", (0, 0), 3, r"slots\[1, 0\] is 1, wanted a slot above 3: .*slots\[0, 0\] comes before"),
    ("slot_pair", 3, 6, r"slot_pair\[3\] is 6, wanted 7"),
    ("slot_pair", 9, 0, r"slot_pair\[9\] is 0, wanted -1: .*padding"),
    ("block_group", 1, 1, r"block_group\[1\] is 1, wanted 0"),
    ("block_target", 4, 2, r"block_target\[4\] is 2, wanted 1: rows that arrive"),
    ("delivery_order", 1, 3, r"delivery_order\[1\] is 3, wanted 1: .*each once"),
    ("delivery_order", 4, 5, r"delivery_order\[4\] is 5, wanted 2: .*smallest slot"),
    ("job_order", 0, 0, r"job_order\[0\] is 0, wanted 1: .*largest slot"),
    ("expected", 1, 3, r"expected\[1\] is 3, wanted 2"),
    ("chunk_expected", (0, 1), 2, r"chunk_expected\[0, 1\] is 2, wanted 1"),
    ("send_count", 1, 3, r"send_count\[1\] is 3, wanted 2"),
    ("send_order", (0, 0), 0, r"send_order\[0, 0\] is 0, wanted -1"),
    ("send_order", (1, 1), 2, r"send_order\[1, 1\] is 2, wanted 1: .*smallest slot"),
    ("contributors", 2, 1, r"contributors\[2\] is 1, wanted 0: bit d"),
]


@pytest.mark.parametrize("name, index, value, message", CORRUPTIONS)
def test_corrupted_table_is_named(tables, name, index, value, message):
    with pytest.raises(ScheduleError, match=f"^{message}"):
        check_tables(corrupt(tables, name, index, value), IDS)


def test_every_table_is_corrupted_above():
    assert {name for name, *_ in CORRUPTIONS} == {f.name for f in fields(Tables) if f.type == "Tensor"}


def test_two_swapped_entries_are_found(tables):
    for name in ("delivery_order", "job_order"):
        order = getattr(tables, name).clone()
        order[[0, 1]] = order[[1, 0]]
        with pytest.raises(ScheduleError, match=rf"^{name}\[0\]"):
            check_tables(replace(tables, **{name: order}), IDS)
    order = tables.send_order.clone()
    order[1, :2] = order[1, [1, 0]]
    with pytest.raises(ScheduleError, match=r"^send_order\[1, 0\]"):
        check_tables(replace(tables, send_order=order), IDS)


def test_a_missing_job_is_found(tables):
    short = replace(tables, job_order=tables.job_order[:-1], delivery_order=tables.delivery_order[:-1])
    with pytest.raises(ScheduleError, match=r"^delivery_order has shape \(4,\), wanted \(5,\)"):
        check_tables(short, IDS)


def test_every_changed_entry_of_every_table_is_found(tables):
    """Mutation sweep: each entry of each table raised and lowered by one."""
    for name, table in tables.tensors().items():
        for index in torch.cartesian_prod(*map(torch.arange, table.shape)).reshape(-1, table.dim()).tolist():
            for delta in (-1, 1):
                changed = corrupt(tables, name, tuple(index), int(table[tuple(index)]) + delta)
                with pytest.raises(ScheduleError):
                    check_tables(changed, IDS)


def test_scalars_are_checked(tables):
    with pytest.raises(ScheduleError, match="first_expert, num_local_experts are 1, 2, wanted 2, 2"):
        check_tables(replace(tables, first_expert=1), IDS)
    with pytest.raises(ArgumentError, match=r"topk_ids has shape \(4, 2\)"):
        check_tables(tables, IDS[:4])
    with pytest.raises(ScheduleError):  # the tables of one routing do not pass for another
        check_tables(tables, IDS.flip(0))


@pytest.mark.parametrize("name", [f.name for f in fields(Tables) if f.type == "Tensor"])
def test_shapes_and_dtypes_are_checked_when_built(tables, name):
    table = getattr(tables, name)
    with pytest.raises(ScheduleError, match=rf"^{name} has dtype torch.float64"):
        replace(tables, **{name: table.double()})
    with pytest.raises(ScheduleError, match=r"has shape .*, wanted "):
        replace(tables, **{name: torch.cat([table, table])})


def test_validate_mode_names_rank_token_slot_and_value():
    ids = IDS.clone()
    counts = torch.tensor([3, 2])
    check_ids(ids, token_counts=counts, world=2, num_experts=4)
    ids[5] = 77  # masked row: not looked at
    check_ids(ids, token_counts=counts, world=2, num_experts=4)
    ids[4, 1] = 4
    with pytest.raises(ArgumentError, match="rank 1, token 1, slot 1 is 4, wanted an expert in 0..3 or -1"):
        check_ids(ids, token_counts=counts, world=2, num_experts=4)
