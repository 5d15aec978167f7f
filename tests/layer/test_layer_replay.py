"""The CPU model of CUDA graphs: launches replayed with frozen arguments. What a call counts with lives in workspace memory. Real
graphs are replayed in tests/cuda."""

from __future__ import annotations

import pytest
from backends import each_world
from moe_cases import LayerCase, with_options
from replay_ranks import cross_the_wrap, cross_the_wrap_on_gpus, refresh_on_gpus, replay_mixed, replay_one

PATTERNS = [("mega", False), ("mega", True), ("two_kernel", False), ("two_kernel", True)]


@pytest.mark.parametrize("pattern, pull", PATTERNS)
def test_grf_01_replays_with_frozen_arguments_are_eager_calls(run_ranks, pattern, pull):
    """20 replays with new inputs and weights, one rank late each time: bitwise the eager result; the epoch moves in memory."""
    case = LayerCase(((40, 40),), ("uniform",), max_tokens=40, options=dict(pattern=pattern, pull=pull))
    run_ranks(2, replay_one, case, 20)


@pytest.mark.parametrize("pattern, pull", PATTERNS)
def test_grf_02_old_flags_do_not_pass_for_new_ones(run_ranks, pattern, pull):
    """Replays in turn of a balanced, an unequal and an empty-source routing, with everything else poisoned."""
    case = LayerCase(((24, 24, 24, 24), (24, 3, 9, 1), (24, 0, 0, 24)), ("uniform", "hot_rank", "half"), 8, 2, 16, 8, 24,
                     options=dict(pattern=pattern, pull=pull))
    run_ranks(4, replay_one, case, 12)


@pytest.mark.parametrize("pattern, pull", PATTERNS)
def test_grf_03_captures_of_different_sizes_share_a_workspace(run_ranks, pattern, pull):
    """T = 1, 8 and 64 in random order, mixed with eager calls: places follow from the largest size alone."""
    case = LayerCase(((1, 1), (8, 8), (64, 64)), ("uniform", "zipf", "uniform"), max_tokens=64,
                     options=dict(pattern=pattern, pull=pull))
    run_ranks(2, replay_mixed, case, 50)


@pytest.mark.parametrize("pattern, pull", [*PATTERNS, ("serial", False)])
def test_counters_cross_the_end_of_32_bits(run_ranks, pattern, pull):
    """Epochs and counters are compared by distance: right results across 2^32."""
    case = LayerCase(((40, 30, 7), (3, 0, 40), (40, 40, 40)), ("uniform", "half", "zipf"), max_tokens=40,
                     options=dict(pattern=pattern, pull=pull))
    assert run_ranks(3, cross_the_wrap, case, 2**32 - 3) == [3, 3, 3]


@each_world((), (1, 2))
def test_counters_on_gpus_cross_the_end_of_32_bits(run_ranks, backend, world):
    case = LayerCase(((40, 30), (3, 0), (40, 40)), ("uniform", "half", "zipf"), max_tokens=40).on(backend)
    assert run_ranks(world, cross_the_wrap_on_gpus, case, 2**32 - 3, backend=backend) == [3] * world


@each_world((), (1, 2))
def test_watermarks_on_gpus_are_refreshed(run_ranks, backend, world):
    """The call whose epoch is 2^30 sets them all to the call before, and those with work to itself."""
    case = LayerCase(((40, 30),), ("uniform",), max_tokens=96).on(backend)
    for left in run_ranks(world, refresh_on_gpus, case, 2**30 - 1, backend=backend):
        assert left <= {-1, 0} and 0 in left


def test_krn_04_many_calls_without_a_pause(run_ranks):
    """The CPU part of the soak: T of 1, 7, 96 and 0 in turn, back to back, both patterns on one workspace at a time."""
    from layer_ranks import run_back_to_back

    case = LayerCase(((1,) * 4, (7, 0, 96, 1), (96,) * 4, (0,) * 4), ("uniform", "hot_rank", "half", "uniform"), 8, 2, 16, 8, 96)
    for pattern in ("mega", "two_kernel"):
        run_ranks(4, run_back_to_back, with_options(case, pattern=pattern), 200)
