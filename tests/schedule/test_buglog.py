"""Entries of the project's bug log that the tables must answer, by id; and the tables executed end to end."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings

from moe_tk.schedule import build_tables, check_tables, expert_range, shard_range

from .cases import assert_equal, cases, fill
from .interpreter import direct, interpret


def build_all(ids: torch.Tensor, world: int, num_experts: int, **arguments) -> list:
    arguments = {"mode": "ep", "row_block": 4, **arguments}
    counts = arguments.pop("token_counts", [ids.shape[0] // world] * world)
    return [build_tables(ids, token_counts=counts, world=world, rank=rank, num_experts=num_experts, **arguments)
            for rank in range(world)]


@settings(max_examples=120, deadline=None)
@given(cases(max_tokens=17, experts=(1, 3, 8, 30, 64)))
def test_interpreted_tables_give_the_layer(case):
    """Moved, computed and summed by the tables alone, every token gets what the definition says."""
    generator = torch.Generator().manual_seed(0)
    weights = torch.rand(case.ids.shape, generator=generator, dtype=torch.float64)
    x = torch.rand(case.ids.shape[0], generator=generator, dtype=torch.float64) + 0.5
    if case.mode == "tp":  # every rank holds a share of every expert: its partial is weighted by 1 / world here
        weights = weights / case.world
    run = interpret([case.build(rank) for rank in range(case.world)], weights, x)
    scale = case.world if case.mode == "tp" else 1
    wanted = direct(case.ids, weights * scale, x, case.counts, case.num_experts)
    torch.testing.assert_close(run.result, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("num_experts, world, counts", [
    (30, 8, [4, 4, 4, 4, 4, 4, 3, 3]), (10, 4, [3, 3, 2, 2]), (257, 8, [33] + [32] * 7), (3, 8, [1] * 3 + [0] * 5),
])
def test_sch_03_remainders_are_spread(num_experts, world, counts):
    """Counts differ by at most one, ranges are contiguous, and every component uses the same function."""
    ranges = [expert_range(num_experts, world, rank) for rank in range(world)]
    assert [count for _, count in ranges] == counts
    assert [first for first, _ in ranges] == [sum(counts[:rank]) for rank in range(world)]
    assert [shard_range(num_experts, world, rank) for rank in range(world)] == ranges
    ids = fill("uniform", world * 12, 2, num_experts, world, seed=1)
    for tables, (first, count) in zip(build_all(ids, world, num_experts), ranges, strict=True):
        assert (tables.first_expert, tables.num_local_experts) == (first, count)
        assert tables.expert_load.tolist() == [int((ids == first + e).sum()) for e in range(count)]
    ones = torch.ones(ids.shape, dtype=torch.float64)
    x = torch.arange(ids.shape[0], dtype=torch.float64)
    run = interpret(build_all(ids, world, num_experts), ones, x)
    torch.testing.assert_close(run.result, direct(ids, ones, x, [12] * world, num_experts))


@pytest.mark.parametrize("row", [[3, 3, 7, 1], [3, 3, 3, 3], [0, 7, 0, 7]])
def test_sch_05_duplicate_experts_add(row):
    """An expert that a row lists twice gets two slots, the row moves once, contributions add (expert 3: .1 + .2)."""
    ids = torch.tensor([row, [0, 1, 2, 3]])
    weights = torch.tensor([[0.1, 0.2, 0.3, 0.4]] * 2, dtype=torch.float64)
    x = torch.tensor([1.0, 2.0], dtype=torch.float64)
    tables = build_all(ids, 2, 8)
    for t in tables:
        check_tables(t, ids)
        used = t.slots[t.slots >= 0]
        assert len(used.unique()) == len(used)
    run = interpret(tables, weights, x)
    by_expert = sum(float(w) * (e + 1) for e, w in zip(row, weights[0], strict=True))
    assert float(run.result[0]) == pytest.approx(by_expert)
    assert all(rows == 1 for rows in run.rows_sent.values())


@pytest.mark.parametrize("row, sent", [
    ([4, 5, 6, 7], {1: 1}), ([0, 1, 6, 7], {0: 1, 1: 1}), ([0, 4, 5, 6], {0: 1, 1: 1}),
])
def test_sch_06_a_row_moves_once_per_rank(row, sent):
    """Several experts on one rank: one transfer, one job, whatever the number of slots."""
    ids = torch.tensor([row, [-1] * 4])
    tables = build_all(ids, 2, 8)
    run = interpret(tables, torch.ones(2, 4, dtype=torch.float64), torch.ones(2, dtype=torch.float64))
    assert run.rows_sent == {(0, there): rows for there, rows in sent.items()}
    assert [t.num_jobs for t in tables] == [sent.get(0, 0), sent.get(1, 0)]
    assert float(run.result[0]) == sum(e + 1 for e in row)


@pytest.mark.parametrize("kind", ["some", "whole rows", "all"])
def test_sch_07_minus_one_is_skipped(kind):
    """-1 is never an index: no slot, no transfer, no job; a row without a valid id gives exact zero."""
    world, tokens = 4, 6
    ids = fill("uniform", world * tokens, 3, 10, world, seed=2)
    if kind == "some":
        ids[:, 1] = -1
    elif kind == "whole rows":
        ids[::2] = -1
    else:
        ids[:] = -1
    tables = build_all(ids, world, 10)
    for t in tables:
        check_tables(t, ids)
        assert bool((t.slots[ids < 0] == -1).all())
        assert int(t.expert_load.sum()) == int((t.slots >= 0).sum())
    assert sum(int(t.expert_load.sum()) for t in tables) == int((ids >= 0).sum())
    weights = torch.full(ids.shape, float("nan"), dtype=torch.float64).masked_fill(ids >= 0, 0.5)
    run = interpret(tables, weights, torch.ones(world * tokens, dtype=torch.float64))
    empty = (ids < 0).all(1)
    assert bool((run.result[empty] == 0).all()) and bool(run.result.isfinite().all())
    if kind == "all":
        assert run.rows_sent == {} and all(t.num_slots == t.num_jobs == 0 for t in tables)


@pytest.mark.parametrize("value", [8, 9, 2**30, -2, -(2**31), 2**31 - 1])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_sch_08_ids_out_of_range_are_skipped(value, dtype):
    """One hostile id in one slot of one rank: treated like -1, other rows unaffected."""
    ids = fill("uniform", 4 * 5, 3, 8, 4, seed=3).to(dtype)
    clean = ids.clone()
    ids[7, 1], clean[7, 1] = value, -1
    for mode in ("ep", "tp"):
        for impl in ("golden", "vectorised"):
            for seen, wanted in zip(build_all(ids, 4, 8, mode=mode, impl=impl),
                                    build_all(clean, 4, 8, mode=mode, impl=impl), strict=True):
                assert_equal(seen, wanted)
                check_tables(seen, ids)


def test_sch_08_ids_beyond_32_bits_do_not_wrap():
    ids = torch.tensor([[2**32, 1], [2**33 + 1, -(2**32)]])
    for mode in ("ep", "tp"):
        tables = build_all(ids, 1, 4, mode=mode)[0]
        assert tables.slots.tolist() == [[-1, 0], [-1, -1]]


@pytest.mark.parametrize("invalid", [-1, 99])
def test_sch_10_invalid_rows_are_sent_nowhere(invalid):
    """Half of the rows invalid: transfers per (source, destination) are those of the valid rows; no default target."""
    world, tokens = 4, 8
    ids = fill("uniform", world * tokens, 2, 16, world, seed=4)
    ids[1::2] = invalid
    tables = build_all(ids, world, 16)
    run = interpret(tables, torch.ones(ids.shape, dtype=torch.float64), torch.ones(world * tokens, dtype=torch.float64))
    for source in range(world):
        for there in range(world):
            first, count = expert_range(16, world, there)
            own = ids[source * tokens : (source + 1) * tokens]
            wanted = int(((own >= first) & (own < first + count)).any(1).sum())
            assert run.rows_sent.get((source, there), 0) == wanted == int(tables[source].send_count[there])
    masked = build_all(ids.clamp(max=15).masked_fill(ids == invalid, 0), world, 16, token_counts=[0] * world)
    assert all(int(t.send_count.sum()) == t.num_jobs == 0 for t in masked)  # masked rows go nowhere either


@pytest.mark.parametrize("num_experts", [8, 64, 128, 256, 257, 384, 512, 1024])
@pytest.mark.parametrize("world", [2, 8])
def test_krn_16_tables_are_sized_from_the_number_of_experts(num_experts, world):
    """Up to 1024 experts and k = 10: every expert, the last one too, gets its rows."""
    tokens = -(-num_experts // (world * 10)) + 2
    ids = (torch.arange(world * tokens * 10) % num_experts).reshape(-1, 10)
    ids[0, 0] = ids[-1, -1] = num_experts - 1
    for mode in ("ep", "tp"):
        golden = build_all(ids, world, num_experts, mode=mode, impl="golden")
        for seen, wanted in zip(build_all(ids, world, num_experts, mode=mode), golden, strict=True):
            check_tables(wanted, ids)
            assert_equal(seen, wanted)
        last = golden[-1]
        assert int(last.expert_load[-1]) == int((ids == num_experts - 1).sum()) >= 1
