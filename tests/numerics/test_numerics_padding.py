"""What is not written must not be read: padding, unused buffers, skipped pairs, tokens and experts that hold NaN."""

from __future__ import annotations

import pytest
import torch
from backends import cuda, each_movement, each_pattern, each_world, on_both_with_ranks, ranks_on
from moe_cases import PATTERNS_OF, LayerCase, with_options
from numerics_ranks import (
    bad_expert,
    bad_weight,
    bad_weights_at_skipped_ids,
    clean_and_poisoned,
    fill_on,
    one_bad_token,
    with_shared_expert,
)

PATTERNS = [("mega", False), ("mega", True), ("two_kernel", False), ("two_kernel", True), ("serial", False)]
CASE = LayerCase(((40, 9, 33), (3, 0, 64), (64, 64, 64)), ("uniform", "half", "zipf"), max_tokens=64)


@pytest.mark.parametrize("mode", ["ep", "tp"])
@each_movement(*PATTERNS, world=2)
def test_num_01_padding_is_never_read(run_ranks, backend, pattern, pull, mode):
    """Real rows have the same bits whether all buffers hold zeros or NaN; the same object runs each call twice."""
    case = with_options(CASE, pattern=pattern, pull=pull, mode=mode).on(backend)
    run_ranks(ranks_on(backend, 3), clean_and_poisoned, case, backend=backend)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@each_movement(*PATTERNS, world=2)
def test_num_01_a_bad_token_spoils_no_other(run_ranks, backend, pattern, pull, value):
    case = with_options(CASE, pattern=pattern, pull=pull).on(backend)
    run_ranks(ranks_on(backend, 3), one_bad_token, case, value, backend=backend)


@pytest.mark.parametrize("weight_position", ["before_l2", "combine"])
@pytest.mark.parametrize("kind", ["half", "out_of_range"])
@on_both_with_ranks
def test_num_01_weights_of_skipped_ids_do_not_matter(run_ranks, backend, kind, weight_position):
    """Skipping is selection, not multiplication by zero."""
    for pattern in ("mega", "serial") if backend == "cpu" else PATTERNS_OF[backend]:
        case = LayerCase(((30, 30),), (kind,), options=dict(pattern=pattern, weight_position=weight_position)).on(backend)
        run_ranks(2, bad_weights_at_skipped_ids, case, backend=backend)


@pytest.mark.parametrize("activation", ["swiglu", "gpt_oss"])
@on_both_with_ranks
def test_num_01_a_bad_expert_reaches_only_its_tokens(run_ranks, backend, activation):
    """Limits of the activation must not turn NaN into a number."""
    for pattern in ("mega", "serial") if backend == "cpu" else PATTERNS_OF[backend]:
        case = LayerCase(((30, 30),), ("uniform",), options=dict(pattern=pattern, activation=activation)).on(backend)
        run_ranks(2, bad_expert, case, backend=backend)


@pytest.mark.parametrize("weight_position", ["before_l2", "combine"])
@pytest.mark.parametrize("backend", [cuda(world=2)])
def test_num_03_what_a_router_makes_of_nan_logits_reaches_only_its_tokens(run_ranks, backend, weight_position):
    """On GPUs, where weights are not looked at before the call; the CPU back end refuses NaN weights."""
    for mode in ("ep", "tp"):
        case = LayerCase(((30, 30),), ("uniform",), hidden=256, options=dict(mode=mode, weight_position=weight_position))
        run_ranks(2, bad_weight, case.on(backend), backend=backend)


@each_pattern("mega", "two_kernel", "serial", world=2)
def test_num_06_results_survive_fills_of_new_tensors(run_ranks, backend, pattern):
    """torch fills new tensors with NaN under deterministic algorithms: 40 calls, all alike and right."""
    case = LayerCase(((40, 9),), ("half",), dtype=torch.bfloat16, options=dict(pattern=pattern)).on(backend)
    for digests in run_ranks(2, fill_on, case, 40, backend=backend):
        assert len(set(digests)) == 1


@pytest.mark.parametrize("mode", ["ep", "tp"])
@each_world((1, 2, 4), (1, 2, 4))
def test_num_09_a_shared_expert_beside_the_layer_counts_once(run_ranks, backend, world, mode):
    """The result is the full sum over the routed experts, on the token's own rank: what is added there counts once."""
    case = LayerCase(((20,) * world,), ("uniform",), options=dict(mode=mode)).on(backend)
    run_ranks(world, with_shared_expert, case, backend=backend)
