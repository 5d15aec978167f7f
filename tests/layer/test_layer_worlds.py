"""World sizes 1 to 8 with default arguments, experts and intermediate columns that do not divide, more ranks than experts."""

from __future__ import annotations

import pytest
import torch
from backends import cuda, each_pattern, each_world, on_both, on_both_with_ranks, ranks_on
from layer_ranks import make_layer, run_epochs
from moe_cases import LayerCase, call, check_result, expected, with_options


def small(world: int, **sizes) -> LayerCase:
    counts = (tuple(20 + rank for rank in range(world)), tuple(7 * (rank % 2) for rank in range(world)))
    return LayerCase(counts, ("uniform", "half"), **{"max_tokens": 32, **sizes})


@each_world(range(1, 9), (1, 2, 4, 8))
def test_krn_12_any_world_size_with_default_arguments(pools, backend, world):
    """World size comes from the group; 10 experts and 36 columns divide by few. Sizes without a pool start ranks of their own."""
    for mode in ("ep", "tp"):
        case = with_options(small(world), mode=mode).on(backend)
        if world in (1, 2, 3, 4, 8):
            pools.run(world, run_epochs, case, backend=backend)
        else:
            failed = [outcome.error for outcome in pools.fresh(world, run_epochs, case) if outcome.error]
            assert not failed, "\n".join(failed)


@pytest.mark.parametrize("backend, experts, world", [
    *(("cpu", *sizes) for sizes in [(30, 8), (10, 4), (257, 8), (3, 8), (1, 4)]),
    *(cuda(*sizes, world=sizes[1]) for sizes in [(31, 2), (257, 2), (3, 2), (1, 2), (30, 4), (30, 8), (3, 8)])])
def test_sch_03_experts_that_do_not_divide_by_the_world(run_ranks, backend, experts, world):
    """Remainders are spread, and ranks may own no expert at all; the result is the reference's."""
    case = small(world, num_experts=experts, top_k=min(3, experts), hidden=16, inter=8)
    run_ranks(world, run_epochs, case.on(backend), backend=backend)


@each_world((2, 4, 8), (2, 4, 8))
@pytest.mark.parametrize("inter", [1536, 896, 1792, 1856, 640, 37, 9])
def test_krn_22_intermediate_size_that_does_not_divide_by_tile_or_world(run_ranks, inter, backend, world):
    """TP shards of any width: tails are computed, not padded, and equal the unsharded reference."""
    case = with_options(small(world, num_experts=4, top_k=2, hidden=16, inter=inter), mode="tp")
    run_ranks(world, run_epochs, case.on(backend), backend=backend)


@on_both_with_ranks
def test_krn_22_fewer_columns_than_ranks_are_refused_up_front(run_ranks, backend):
    world = ranks_on(backend, 4)
    for kind, text, _ in run_ranks(world, make_layer, small(world, inter=world - 1).on(backend), mode="tp", backend=backend):
        assert kind == "ArgumentError"
        assert f"intermediate_size is {world - 1}, wanted an integer >= {world}; the nearest valid value is {world}" in text


@pytest.mark.parametrize("num_experts", [512, 1024])
@each_world((2, 8), (2, 8))
def test_krn_16_many_experts(run_ranks, num_experts, backend, world):
    """Up to 1024 experts with 10 choices per token, the last expert among them."""
    case = LayerCase(((24,) * world, (5,) * world), ("uniform", "last_expert"), num_experts, 10, 8, 4, 32)
    run_ranks(world, run_epochs, case.on(backend), backend=backend)


@pytest.mark.parametrize("hidden", [1536, 2048, 2880, 3072, 4096, 6144, 7168, 96, 200, 8])
@on_both
def test_krn_21_any_hidden_size_that_is_a_multiple_of_8(hidden, backend, nothing_left):
    for dtype in (torch.bfloat16, torch.float32) if backend == "cpu" else (torch.bfloat16,):
        case = LayerCase(((5,),), ("uniform",), 4, 2, hidden, 8, 8, dtype).on(backend)
        layer = case.layer()
        inputs = case.inputs(0, 1, 0)
        check_result(call(layer, *inputs), expected(case, layer, inputs), inputs[1], 4, dtype)


@each_pattern("serial", "two_kernel", "mega", world=1)
def test_ops_03_a_single_process_computes_the_true_result(backend, pattern, nothing_left):
    """World 1 without any process group: nothing is exchanged and nothing is left unwritten."""
    case = LayerCase(((60,), (0,), (1,)), ("uniform", "none", "half"), options=dict(pattern=pattern)).on(backend)
    layer = case.layer()
    for epoch in range(3):
        inputs = case.inputs(epoch, 1, 0)
        out = torch.full_like(inputs[0], float("nan"))
        check_result(call(layer, *inputs, out=out), expected(case, layer, inputs), inputs[1], 10, case.dtype)
