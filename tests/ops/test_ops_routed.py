"""dispatch_gemm, gemm_combine and mega_moe against the float64 reference, together and each alone."""

from __future__ import annotations

import itertools

import pytest
import torch
from moe_cases import LayerCase
from ops_ranks import group_sizes, mega, two_steps

EVEN = LayerCase(((40,) * 3, (0,) * 3, (3,) * 3), ("uniform", "none", "duplicates"), num_experts=7, hidden=24, inter=19)
UNEVEN = LayerCase(((40, 0, 9), (0, 0, 0), (1, 33, 40)), ("half", "uniform", "out_of_range"), num_experts=7, hidden=24, inter=19)


@pytest.mark.parametrize("mode", ["ep", "tp"])
@pytest.mark.parametrize("weight_position", ["before_l2", "combine"])
@pytest.mark.parametrize("case, stride", [(EVEN, None), (EVEN, 50), (UNEVEN, 40)], ids=["even", "even, larger stride", "uneven"])
def test_dispatch_then_combine_is_the_layer(run_ranks, case, stride, weight_position, mode):
    """Activated rows, offsets and slots are right on their own; rows without a pair are zero and are not read by the combine."""
    run_ranks(3, two_steps, case, mode=mode, activation="swiglu", limit=None, weight_position=weight_position, stride=stride)


@pytest.mark.parametrize("activation, limit", [("gpt_oss", None), ("swiglu", 0.5), ("gpt_oss", 0.5)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dispatch_activations_and_types(run_ranks, activation, limit, dtype):
    case = LayerCase(((30, 12),), ("zipf",), num_experts=3, top_k=2, hidden=40, inter=70, dtype=dtype)
    run_ranks(2, two_steps, case, mode="ep", activation=activation, limit=limit, weight_position="before_l2", stride=30)


@pytest.mark.parametrize("sizes", [[3, 0, 5], [0, 0, 8], [8, 0, 0], [0, 0, 0], [1, 1, 1], [40, 0, 33]])
def test_num_02_experts_without_rows_leave_no_garbage(run_ranks, sizes):
    run_ranks(1, group_sizes, sizes)


@pytest.mark.parametrize("mode", ["ep", "tp"])
@pytest.mark.parametrize("weight_position", ["before_l2", "combine"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mega_moe_is_the_layer(run_ranks, dtype, weight_position, mode):
    """Uneven T (KRN-07), T that grows and shrinks from call to call, segments that follow from it, twice each."""
    case = LayerCase(((40, 0, 9), (0, 0, 0), (300, 33, 4), (1, 1, 1)), ("half", "uniform", "zipf", "hot_rank"), 7, 3, 24, 19,
                     dtype=dtype)
    run_ranks(3, mega, case, mode=mode, weight_position=weight_position, activation="gpt_oss", swiglu_limit=2.0)


@pytest.mark.parametrize("world, experts", [(1, 4), (4, 3), (8, 10), (8, 3)])
def test_mega_moe_in_other_worlds(run_ranks, world, experts):
    case = LayerCase((tuple(range(3, 3 + world)),), ("uniform",), experts, 2, 16, 8 * world)
    for mode in ("ep", "tp"):
        run_ranks(world, mega, case, mode=mode)


def test_ops_and_layers_share_a_group(run_ranks):
    """Layers and ops in turn on one group, each on memory of its own."""
    run_ranks(2, layers_and_ops, LayerCase(((9, 4),), ("uniform",)))


def layers_and_ops(rank: int, world: int, case: LayerCase) -> None:
    from layer_ranks import call_and_check

    layer = case.layer()
    for _, name in itertools.product(range(3), ("layer", "ops")):
        if name == "layer":
            call_and_check(layer, case, 0)
        else:
            mega(rank, world, case)
