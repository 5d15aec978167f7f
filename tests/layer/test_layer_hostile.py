"""Routings that real routers do not produce, and some that they do: everything on one rank, nothing at all, ids that are none."""

from __future__ import annotations

import itertools

import pytest
import torch
from backends import each_movement, each_pattern, on_both, on_both_with_ranks, ranks_on
from layer_ranks import call_and_check, compare_routings, run_back_to_back, run_epochs, run_in_canaries, send_counts
from moe_cases import PATTERNS_OF, LayerCase, call, with_options

from moe_tk import reference
from moe_tk.schedule import expert_range


@each_pattern("mega", "two_kernel", world=2)
def test_krn_01_everything_on_one_rank(run_ranks, backend, pattern):
    """World 8, all pairs on the experts of one rank, against one hot expert: 100 launches each, all equal."""
    world = ranks_on(backend, 8)
    for kind in ("hot_rank", "hot_expert"):
        case = LayerCase(((24,) * world,), (kind,), 32, 4, 16, 8, 32, options=dict(pattern=pattern)).on(backend)
        run_ranks(world, run_back_to_back, case, 100 if kind == "hot_rank" else 50, backend=backend)


KRN_02 = {  # whether rank 2 (the last of fewer) has tokens, routing
    "no token for rank 2": (True, "spare_rank_2"), "no token on rank 2": (False, "uniform"), "neither": (False, "spare_rank_2"),
}


@each_movement(("mega", False), ("mega", True), ("two_kernel", False), ("serial", False), world=2)
def test_krn_02_a_rank_without_tokens_or_work(run_ranks, backend, pattern, pull):
    """All ranks return, outputs are [T, H] also for T = 0, and ranks without tokens serve their experts."""
    world = ranks_on(backend, 4)
    idle = min(2, world - 1)
    counts = [tuple(9 if has or rank != idle else 0 for rank in range(world)) for has, _ in KRN_02.values()]
    case = LayerCase((*counts, (0,) * world), (*(kind for _, kind in KRN_02.values()), "uniform"), 8, 2, 16, 8, 16,
                     options=dict(pattern=pattern, pull=pull)).on(backend)
    run_ranks(world, run_epochs, case, backend=backend)


@pytest.mark.parametrize("mode", ["ep", "tp"])
@each_pattern("mega", "two_kernel", "serial", world=2)
def test_krn_19_one_expert_takes_all_and_neighbours_stay_untouched(run_ranks, backend, pattern, mode):
    """No slot limit per expert: 1024 tokens on the last expert, then on the first; nothing is written between regions."""
    case = LayerCase(((512, 512), (512, 512), (512, 100)), ("last_expert", "first_expert", "hot_expert"), 8, 2, 24, 12, 512,
                     options=dict(pattern=pattern, mode=mode)).on(backend)
    assert all(watched > 1000 for watched in run_ranks(2, run_in_canaries, case, backend=backend))


@each_pattern("mega", "two_kernel", "serial", world=2)
@pytest.mark.parametrize("mode", ["ep", "tp"])
def test_sch_05_duplicate_experts_add(run_ranks, backend, pattern, mode):
    """Experts [3, 3, 7, 1] with weights .1 .2 .3 .4 are experts [3, 7, 1] with .3 .3 .4; all choices equal are one."""
    case = LayerCase(((4, 4),), ("uniform",), 8, 4, 64, 8, 16, options=dict(pattern=pattern, mode=mode)).on(backend)
    run_ranks(2, duplicates, case, backend=backend)


def duplicates(rank: int, world: int, case: LayerCase) -> None:
    layer = case.layer()
    hidden, _, _ = case.inputs(0, world, rank)
    ids = torch.tensor([[3, 3, 7, 1], [5, 5, 5, 5], [0, 1, 0, 1], [2, 2, -1, 2]])
    weights = torch.tensor([[0.1, 0.2, 0.3, 0.4], [0.1, 0.2, 0.3, 0.4], [0.5, 0.25, 0.5, 0.25], [1.0, 1.0, 9.0, 1.0]])
    merged_ids = torch.tensor([[3, -1, 7, 1], [5, -1, -1, -1], [0, 1, -1, -1], [2, -1, -1, -1]])
    merged = torch.tensor([[0.3, 0.0, 0.3, 0.4], [1.0, 0.0, 0.0, 0.0], [1.0, 0.5, 0.0, 0.0], [3.0, 0.0, 0.0, 0.0]])
    want = layer.reference(hidden, merged_ids, merged, *case.weights())
    assert reference.relative_error(call(layer, hidden, ids, weights), want) <= reference.ERROR_BUDGET[case.dtype]
    per_expert = torch.tensor([2, 3, 3, 2, 0, 4, 0, 1]) * world
    first, count = (0, 8) if layer.mode == "tp" else expert_range(8, world, rank)
    assert layer.expert_load.tolist() == per_expert[first:first + count].tolist()


# Bytes are counted on the CPU back end only: what moves on GPUs follows from the tables, and tests/cuda compares those.
ROW = 40 * 4  # bytes of a row of LayerCase's default width in float32


@pytest.mark.parametrize("pattern, pull", [("mega", False), ("mega", True), ("two_kernel", False), ("two_kernel", True)])
def test_sch_06_a_row_travels_once_per_rank_and_comes_back_once(run_ranks, pattern, pull):
    """Four experts on one rank: one transfer there, one partial back, whatever the number of choices; own rows do not travel."""
    case = LayerCase(((5, 5),), ("all_on_last_rank",), 8, 4, max_tokens=16, options=dict(pattern=pattern, pull=pull))
    results = run_ranks(2, send_counts, case, 0)
    dispatched, combined = [r[0] for r in results], [r[1] for r in results]
    # Rank 0's five rows go to rank 1 (read from rank 0 when pulled); rank 1 returns five partial rows.
    assert dispatched == ([[0, 0], [5 * ROW, 0]] if pull else [[0, 5 * ROW], [0, 0]])
    assert combined == [[0, 0], [5 * ROW, 0]]
    assert [sum(load) for _, _, load in results] == [0, 40]


@pytest.mark.parametrize("pull", [False, True])
def test_sch_06_two_experts_on_each_rank_are_one_transfer_each(run_ranks, pull):
    case = LayerCase(((5, 3),), ("two_and_two",), 8, 4, max_tokens=16, options=dict(pull=pull))
    results = run_ranks(2, send_counts, case, 0)
    assert [r[0] for r in results] == ([[0, 3 * ROW], [5 * ROW, 0]] if pull else [[0, 5 * ROW], [3 * ROW, 0]])
    assert [r[1] for r in results] == [[0, 3 * ROW], [5 * ROW, 0]]


@pytest.mark.parametrize("pull", [False, True])
@pytest.mark.parametrize("kind", ["half_rows", "none", "out_of_range_rows"])
def test_sch_10_invalid_rows_move_no_byte(run_ranks, kind, pull):
    """World 4, half of the rows invalid: bytes per destination are those of the valid rows alone, no rank is a default target."""
    world, tokens = 4, 12
    case = LayerCase(((tokens,) * world,), (kind,), 8, 2, max_tokens=16, options=dict(pull=pull))
    results = run_ranks(world, send_counts, case, 0)
    wants = [[0] * world for _ in range(world)]  # [source][destination]
    for source, there in itertools.permutations(range(world), 2):
        ids = case.inputs(0, world, source)[1]
        wants[source][there] = ROW * int(((ids // 2 == there) & (ids >= 0) & (ids < 8)).any(1).sum())
    transposed = [[wants[source][rank] for source in range(world)] for rank in range(world)]
    assert [r[0] for r in results] == (transposed if pull else wants)
    assert [r[1] for r in results] == transposed
    assert sum(map(sum, wants)) > 0 or kind == "none"


@on_both_with_ranks
def test_sch_07_a_warm_up_batch_of_nothing_but_minus_one(run_ranks, backend):
    """All ids -1 on all ranks: exact zeros, nothing moves; the next, real batch on the same layer is right."""
    for mode in ("ep", "tp"):
        for pattern in PATTERNS_OF[backend]:
            case = LayerCase(((7, 7, 0, 7),) * 3, ("none", "half", "none"), options=dict(mode=mode, pattern=pattern))
            run_ranks(ranks_on(backend, 4), run_epochs, case.on(backend), backend=backend)


@pytest.mark.parametrize("value", [10, 11, 2**30, -2, 2**31 - 1, -(2**31), 2**31 + 3, 2**32, 2**32 + 3, -(2**32) + 1, 2**62])
@on_both_with_ranks
def test_sch_08_an_id_out_of_range_is_skipped(run_ranks, backend, value):
    """One hostile id in one slot of one rank counts as -1, also when its low 32 bits are a valid id; other rows are unaffected."""
    run_ranks(2, compare_routings, LayerCase(((8, 8),), ("uniform",)).on(backend), value, backend=backend)


@each_movement(("mega", False), ("mega", True), ("two_kernel", False), ("serial", False), world=2)
def test_sch_09_fewer_tokens_than_in_the_call_before(run_ranks, backend, pattern, pull):
    """128 tokens, then 3, then 128 again, with garbage in everything that the second call does not write itself."""
    case = LayerCase(((128, 128), (3, 3), (128, 3), (3, 128)), ("uniform", "zipf", "hot_expert", "uniform"), max_tokens=128,
                     options=dict(pattern=pattern, pull=pull)).on(backend)
    run_ranks(2, run_epochs, case, backend=backend)


@on_both
def test_sch_11_the_number_of_tokens_builds_nothing(monkeypatch, backend, nothing_left):
    """200 different T on one layer: one native module, which is loaded already; no module is built or looked up again."""
    from moe_tk.runtime import host, nvlink

    case = LayerCase(((1,),), ("uniform",), 4, 2, 8, 4, 8192).on(backend)
    layer = case.layer()
    built = []
    monkeypatch.setattr(host, "build_host_module", lambda *arguments: built.append(arguments))
    monkeypatch.setattr(nvlink, "build_cuda_module", lambda *arguments, **named: built.append(arguments))
    for tokens in (*range(1, 190), 255, 256, 257, 1000, 2047, 2048, 2049, 4095, 4096, 8191, 8192):
        hidden = torch.ones(tokens, 8, dtype=case.dtype)
        assert call(layer, hidden, torch.zeros(tokens, 2, dtype=torch.int32), torch.ones(tokens, 2)).shape == (tokens, 8)
    assert built == []


@on_both
def test_sch_12_there_is_no_capacity_factor_and_nothing_is_dropped(backend, nothing_left):
    """Dropless: no argument limits the slots of an expert, and every pair of the worst routing is counted and computed."""
    case = LayerCase(((64,),), ("hot_expert",), 4, 2, 16, 8, 64).on(backend)
    with pytest.raises(TypeError, match="capacity_factor"):
        case.layer(capacity_factor=0.4)
    layer = case.layer()
    call_and_check(layer, case, 0)
    assert layer.expert_load.sum() == 128 and layer.expert_load[2] == 64


@on_both_with_ranks
def test_ops_05_tokens_vary_from_call_to_call_and_rank_to_rank(run_ranks, backend):
    case = LayerCase(((128, 0), (7, 128), (0, 0), (512, 1), (1, 512)), ("uniform", "zipf", "uniform", "half", "uniform"),
                     max_tokens=512)
    for pattern in PATTERNS_OF[backend]:
        run_ranks(2, run_epochs, with_options(case, pattern=pattern).on(backend), backend=backend)


def test_ring_routing_that_filled_a_segment_after_an_almost_empty_one(nothing_left, monkeypatch):
    """Once a deadlock: two segments near their largest around one of three row blocks, early rows with late slots."""
    from moe_tk.planner import plan

    monkeypatch.setattr(plan, "ROW_BLOCK", 4)
    tokens, segments, experts = 64, 4, 4
    ids = torch.full((tokens, 2), -1)
    for segment in (0, 2, 3):
        ids[16 * segment:16 * segment + 16] = 0
        ids[16 * segment:16 * segment + 5] = torch.tensor([[0, 3], [0, 1], [0, 2], [0, 3], [0, 3]])
    ids[16:18] = torch.tensor([[0, 1], [2, -1]])
    for blocks in (1, 2, 4, 8):
        case = LayerCase(((tokens,),), ("uniform",), experts, 2, 16, 8, tokens,
                         options=dict(segments=segments, compute_blocks=blocks, timeout_s=5, pattern="mega"))
        layer = case.layer()
        assert layer.session.geometry.ring_blocks < layer.session.geometry.max_blocks
        hidden, _, weights = case.inputs(0, 1, 0)
        got = layer(hidden, ids, weights)
        assert reference.relative_error(got, layer.reference(hidden, ids, weights, *case.weights())) <= 1e-5
