"""What is not written must not be read: padding, unused buffers, skipped pairs, tokens and experts that hold NaN."""

from __future__ import annotations

import pytest
import torch
from moe_cases import LayerCase, with_options
from numerics_ranks import bad_expert, bad_weights_at_skipped_ids, clean_and_poisoned, fill_on, one_bad_token

PATTERNS = [("mega", False), ("mega", True), ("two_kernel", False), ("two_kernel", True), ("serial", False)]
CASE = LayerCase(((40, 9, 33), (3, 0, 64), (64, 64, 64)), ("uniform", "half", "zipf"), max_tokens=64)


@pytest.mark.parametrize("mode", ["ep", "tp"])
@pytest.mark.parametrize("pattern, pull", PATTERNS)
def test_num_01_padding_is_never_read(run_ranks, pattern, pull, mode):
    """Real rows have the same bits whether all buffers hold zeros or NaN; the same object runs each call twice."""
    run_ranks(3, clean_and_poisoned, with_options(CASE, pattern=pattern, pull=pull, mode=mode))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("pattern, pull", PATTERNS)
def test_num_01_a_bad_token_spoils_no_other(run_ranks, pattern, pull, value):
    run_ranks(3, one_bad_token, with_options(CASE, pattern=pattern, pull=pull), value)


@pytest.mark.parametrize("weight_position", ["before_l2", "combine"])
@pytest.mark.parametrize("kind", ["half", "out_of_range"])
def test_num_01_weights_of_skipped_ids_do_not_matter(run_ranks, kind, weight_position):
    """Skipping is selection, not multiplication by zero."""
    for pattern in ("mega", "serial"):
        case = LayerCase(((30, 30),), (kind,), options=dict(pattern=pattern, weight_position=weight_position))
        run_ranks(2, bad_weights_at_skipped_ids, case)


@pytest.mark.parametrize("activation", ["swiglu", "gpt_oss"])
def test_num_01_a_bad_expert_reaches_only_its_tokens(run_ranks, activation):
    """Limits of the activation must not turn NaN into a number."""
    for pattern in ("mega", "serial"):
        run_ranks(2, bad_expert, LayerCase(((30, 30),), ("uniform",), options=dict(pattern=pattern, activation=activation)))


@pytest.mark.parametrize("pattern", ["mega", "two_kernel", "serial"])
def test_num_06_results_survive_fills_of_new_tensors(run_ranks, pattern):
    """torch fills new tensors with NaN under deterministic algorithms: 40 calls, all alike and right."""
    for digests in run_ranks(2, fill_on, LayerCase(((40, 9),), ("half",), dtype=torch.bfloat16, options=dict(pattern=pattern)), 40):
        assert len(set(digests)) == 1
