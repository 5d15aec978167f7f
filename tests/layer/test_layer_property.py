"""Any layer that hypothesis draws, friendly or hostile, equals the reference: in one process, and over two and three ranks."""

from __future__ import annotations

import pytest
import torch
from backends import cuda
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from layer_ranks import run_any
from moe_cases import PATTERNS_OF, LayerCase


@st.composite
def any_layer(draw, world: int, backend: str = "cpu"):
    """(case, tile sizes, ids of every epoch): all options, small sizes with tails, ids from below -1 to above the last expert."""
    experts = draw(st.integers(1, 9))
    top_k = draw(st.integers(1, min(4, experts)))
    most = draw(st.sampled_from([1, 2, 7, 33, 70]))
    epochs = draw(st.integers(1, 3))
    counts = tuple(tuple(draw(st.integers(0, most)) for _ in range(world)) for _ in range(epochs))
    mode = draw(st.sampled_from(["ep", "tp"]))
    pattern, pull = draw(st.sampled_from([
        (pattern, pull) for pattern in PATTERNS_OF[backend] for pull in (False, True) if pattern != "serial" or not pull]))
    limit = draw(st.sampled_from([None, 0.5]))
    options = dict(mode=mode, pattern=pattern, pull=pull, segments=draw(st.integers(1, 6)), compute_blocks=draw(st.integers(1, 5)),
                   activation=draw(st.sampled_from(["swiglu", "gpt_oss"])), swiglu_limit=limit,
                   weight_position=draw(st.sampled_from(["before_l2", "combine"])))
    case = LayerCase(counts, ("uniform",) * epochs, experts, top_k, 8 * draw(st.integers(1, 4)), draw(st.integers(world, 30)), most,
                     draw(st.sampled_from([torch.float32, torch.bfloat16])), seed=draw(st.integers(0, 99)), options=options)
    if backend == "cuda":
        options["row_block"] = draw(st.sampled_from([None, 64, 128]))
    tiles = draw(st.sampled_from([1, 2, 4, 32])), draw(st.sampled_from([5, 16, 64])), draw(st.sampled_from([1, 3, 32]))
    ids = [draw(ids_of(world * max(row), top_k, experts)) for row in counts]
    return case.on(backend), tiles, ids


def ids_of(rows: int, top_k: int, experts: int):
    """[rows * k] ids: all alike, of few experts, of all, of none, or anything."""
    lowest, highest = -2, experts + 1
    pairs = range(rows * top_k)
    chance = st.randoms(use_true_random=False)
    return st.one_of(
        st.integers(lowest, highest).map(lambda one: [one for _ in pairs]),
        st.lists(st.integers(lowest, highest), min_size=1, max_size=7).map(lambda few: [few[i % len(few)] for i in pairs]),
        chance.map(lambda c: [c.randint(0, experts - 1) for _ in pairs]),
        chance.map(lambda c: [c.randint(lowest, highest) for _ in pairs]))


QUIET = dict(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow,
                                                   HealthCheck.data_too_large])


def test_any_layer_in_one_process(nothing_left):
    @settings(max_examples=80, **QUIET)
    @given(any_layer(1))
    def check(case):
        run_any(0, 1, *case)

    check()


@pytest.mark.parametrize("backend, world, examples", [("cpu", 2, 40), ("cpu", 3, 25), cuda(1, 20, world=1), cuda(2, 20, world=2)])
def test_any_layer_over_ranks(run_ranks, backend, world, examples):
    # Device time is dear: what fails on a GPU is not made smaller.
    more = {} if backend == "cpu" else {"phases": [Phase.generate], "derandomize": True, "database": None}

    @settings(max_examples=examples, **QUIET, **more)
    @given(any_layer(world, backend))
    def check(case):
        run_ranks(world, run_any, *case, backend=backend)

    check()
