"""Ranks that do not come, stop half-way, raise, or are merely slow. Deaths are in tests/faults."""

from __future__ import annotations

import pytest
from backends import cuda, on_both_with_ranks, ranks_on
from layer_ranks import make_layer
from moe_cases import PATTERNS_OF, LayerCase, with_options
from refusal_ranks import call_after_slow_start, launches_too_little, never_comes, raises_inside, skip_when_empty, stops_inside

from moe_tk.runtime.nvlink_session import GATHER, OPEN

CASE = LayerCase(((9, 4, 7, 5),), ("uniform",))
LIMIT_S = 0.4


@pytest.mark.parametrize("backend, pattern, absent", [
    *(("cpu", pattern, absent) for pattern in PATTERNS_OF["cpu"] for absent in ([2], [0, 3])),
    *(cuda(pattern, absent, world=world) for pattern in PATTERNS_OF["cuda"]
      for absent, world in (([0], 2), ([1], 2), ([0, 3], 4)))])
def test_a_rank_that_never_comes(run_ranks, backend, pattern, absent):
    """ProtocolTimeout on the others within the limit + 1 s, naming op, phase and rank; the layer refuses calls from then on."""
    results = run_ranks(ranks_on(backend, 4), never_comes, with_options(CASE, pattern=pattern).on(backend), absent, LIMIT_S,
                        backend=backend)
    missing = f"rank {absent[0]}" if len(absent) == 1 else "ranks 0, 3"
    for rank, told in enumerate(results):
        if rank in absent:
            continue
        (error, text, seconds), (second_error, second_text, second_seconds) = told
        assert error == "ProtocolTimeout" and text.startswith(f"moe_layer: missing {missing}."), text
        assert "phase exchange" in text and f"rank {rank} waited" in text and f"timeout_s (now {LIMIT_S})" in text
        assert LIMIT_S <= seconds < LIMIT_S + 1.0
        assert second_error == "MoETkError" and "unusable since an earlier call failed" in second_text and second_seconds < LIMIT_S


@on_both_with_ranks
def test_a_rank_that_never_comes_to_the_first_call(run_ranks, backend):
    results = run_ranks(ranks_on(backend, 4), never_comes, CASE.on(backend), [1], LIMIT_S, calls_before=0, backend=backend)
    assert {told[0][0] for rank, told in enumerate(results) if rank != 1} == {"ProtocolTimeout"}


@pytest.mark.parametrize("pattern, launch, phases", [("mega", 0, ("dispatch", "reduce")), ("two_kernel", 0, ("dispatch",)),
                                                     ("two_kernel", 1, ("reduce",))])
def test_krn_09_a_rank_that_stops_half_way_is_named(run_ranks, pattern, launch, phases):
    """Rank 2 stops before its launch, or before the combine: op, phase, who waited, who is missing, how long, and what to do."""
    told = run_ranks(4, stops_inside, with_options(CASE, pattern=pattern), 2, launch, LIMIT_S)
    for rank, (error, text, _) in enumerate(told):
        if rank == 2:
            continue
        assert error == "ProtocolTimeout" and "moe_layer: missing rank 2" in text, text
        assert any(f"phase {phase}" in text for phase in phases) and " s for rank 2" in text
        assert "raise timeout_s" in text and "moe_tk explain-timeout" in text


@pytest.mark.parametrize("stages, phases", [(OPEN, ("reduce",)), (OPEN | GATHER, ("reduce",))])
@pytest.mark.parametrize("backend", [cuda(world=2)])
def test_krn_09_a_rank_that_launches_too_little_is_named(run_ranks, backend, stages, phases):
    """On GPUs: rank 1 launches some kernels of its call only; the other one waits for its partial rows, and says so."""
    (error, text, seconds), _ = run_ranks(2, launches_too_little, CASE.on(backend), 1, stages, LIMIT_S, backend=backend)
    assert error == "ProtocolTimeout" and "moe_layer: missing rank 1" in text and seconds < LIMIT_S + 1.0, text
    assert any(f"phase {phase}" in text for phase in phases) and "raise timeout_s" in text and "explain-timeout" in text


def test_an_exception_in_the_middle_of_a_call_ends_it_on_all_ranks(run_ranks):
    """The rank that raised shows its own exception, the others are told at once and pointed to it; all refuse further calls."""
    results = run_ranks(4, raises_inside, CASE, 3)
    for rank, ((error, text, seconds), (second_error, second_text, _)) in enumerate(results):
        if rank == 3:
            assert (error, text) == ("MemoryError", "no memory for the launch")
        else:
            assert error == "ProtocolTimeout" and "rank 3 raised an exception in the middle of the call" in text
            assert "Read the traceback of rank 3" in text and seconds < 3.0
        assert second_error == "MoETkError" and "unusable" in second_text


@on_both_with_ranks
def test_krn_08_a_rank_without_tokens_must_call_too(run_ranks, backend):
    """A rank that skips the call since it has no tokens is named by the others."""
    world = ranks_on(backend, 4)
    told = run_ranks(world, skip_when_empty, LayerCase(((*(3, 4, 3)[:world - 1], 0),), ("uniform",)).on(backend), backend=backend)
    assert [error for error, _, _ in told] == ["ProtocolTimeout"] * (world - 1) + ["skipped"]
    assert all(f"missing rank {world - 1}" in text for _, text, _ in told[:-1])


@on_both_with_ranks
def test_krn_08_sizes_are_agreed_not_taken_from_this_rank(run_ranks, backend):
    case = LayerCase(((3, 4, 3, 4),), ("uniform",)).on(backend)
    told = run_ranks(ranks_on(backend, 4), call_after_slow_start, case, 0.0, 5.0, backend=backend)
    assert {error for error, _, _ in told} == {"none"}


@on_both_with_ranks
def test_krn_10_the_limit_is_in_seconds_and_can_be_raised(run_ranks, backend):
    """A rank that is 1.2 s late: too late for a limit of 0.4 s, in time for one of 10 s."""
    case = LayerCase(((9, 4),), ("uniform",)).on(backend)
    told = run_ranks(2, call_after_slow_start, case, 1.2, 0.4, backend=backend)
    assert told[1][0] == "ProtocolTimeout" and 0.4 <= told[1][2] < 1.2
    told = run_ranks(2, call_after_slow_start, case, 1.2, 10.0, backend=backend)
    assert [error for error, _, _ in told] == ["none", "none"] and told[1][2] >= 1.0


@on_both_with_ranks
def test_krn_10_slow_set_up_is_not_charged_to_the_calls(run_ranks, backend):
    """Making a layer ends with all ranks having come: a rank that compiles for a second needs no longer limit."""
    told = run_ranks(2, make_layer, LayerCase(((9, 4),), ("uniform",)).on(backend), late_s=1.2, timeout_s=0.3, backend=backend)
    assert [error for error, _, _ in told] == ["none", "none"] and told[1][2] >= 1.0


def test_krn_10_the_limit_comes_from_the_environment(monkeypatch, nothing_left):
    monkeypatch.setenv("MOE_TK_TIMEOUT_S", "3.5")
    case = LayerCase(((1,),), ("uniform",))
    assert case.layer().timeout_s == 3.5 and case.layer(timeout_s=7).timeout_s == 7.0
    for bad in ("0", "-1", "soon", "inf"):
        monkeypatch.setenv("MOE_TK_TIMEOUT_S", bad)
        with pytest.raises(ValueError, match="environment variable MOE_TK_TIMEOUT_S=.* wanted seconds > 0"):
            case.layer()


def test_blocks_that_wait_for_each_other_blame_no_rank():
    """A wait that only the waiting rank itself could end says so, and does not ask for a rank called nobody."""
    from moe_tk.runtime.faults import error_from, readable

    record = dict(rank=1, op=1, phase=4, role=3, block=2, slot=9, producer=1, expected=32, seen=0, kind=1, epoch=5, seconds=2.5,
                  missing=0)
    text = str(error_from([readable(record)], op="moe_layer", rank=1, dead=set(), timeout_s=2.0))
    assert text.startswith("moe_layer: no rank is missing, but the blocks of rank 1 stood still. rank 1 waited 2.50 s for its own "
                           "blocks")
    assert "row block 9" in text and "nobody" not in text


@on_both_with_ranks
def test_a_rank_that_never_makes_the_layer(pools, backend):
    """Set-up is bounded too: the time-out says what was being set up. Its process group is of no use afterwards."""
    outcomes = pools.fresh(ranks_on(backend, 3), make_layer_without_rank_1, CASE.on(backend), backend=backend)
    for rank in [rank for rank in range(len(outcomes)) if rank != 1]:
        assert outcomes[rank].error is None, outcomes[rank].error
        error, text, seconds = outcomes[rank].value
        assert error in ("ProtocolTimeout", "PeerLost") and text.startswith("workspace: agree on one: rank") and seconds < 3.0


def make_layer_without_rank_1(rank: int, world: int, case: LayerCase) -> tuple[str, str, float] | None:
    import os
    import time

    os.environ["MOE_TK_FIRST_CALL_TIMEOUT_S"] = "1"
    if rank == 1:
        time.sleep(2.0)
        return None
    return make_layer(rank, world, case)
