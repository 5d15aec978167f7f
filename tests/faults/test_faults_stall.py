"""Ranks that stop, come late or are slow: a stall ends within the time limit and a second, and what is only slow is left alone."""

from __future__ import annotations

import os
import signal
import time

import pytest
from fault_lab import (
    FAILED,
    READY,
    STRUCK,
    Board,
    arm,
    checked_call,
    failure_of,
    go_on_when_given_up,
    inputs,
    make_layer,
    play,
    routed_to,
    run_ranks,
    set_limit,
    values,
)
from fault_scenarios import STALL_LIMIT_S, Scenario

from moe_tk.runtime import session as sessions


@pytest.mark.parametrize(("phase", "world", "mode"), [("exchange", 3, "ep"), ("dispatch", 2, "tp"), ("combine", 4, "ep")])
def test_stopped_and_continued_in_time(tmp_path, phase, world, mode):
    verdict = play(Scenario(world=world, mode=mode, phase=phase, point=3 if phase != "exchange" else 2, action="stop", seconds=0.6,
                            timeout_s=2.5), tmp_path)
    assert verdict.problems == []


@pytest.mark.parametrize(("phase", "world", "pattern", "mode"), [
    ("exchange", 4, "mega", "ep"), ("dispatch", 3, "mega", "tp"), ("gemm1", 2, "two_kernel", "ep"),
    ("gemm2", 3, "two_kernel", "tp"), ("combine", 3, "mega", "ep"), ("reduce", 2, "mega", "tp"),
    ("barrier", 3, "two_kernel", "ep")])
def test_krn_09_stopped_beyond_the_limit(tmp_path, phase, world, pattern, mode):
    """ProtocolTimeout names op, phase, ranks and seconds; the stopped rank fails too when it goes on, and all can rebuild."""
    verdict = play(Scenario(world=world, pattern=pattern, mode=mode, phase=phase, point=2, action="stop", seconds=0.9,
                            timeout_s=0.8), tmp_path)
    assert verdict.problems == []
    if phase == "exchange":  # in the others it depends on the routing where a rank waits
        assert all("(phase exchange, role host, " in text for text in verdict.texts.values())


def finish_what_failed(rank: int, world: int, board_path: str) -> tuple[int, str]:
    """Rank 1 stops when it has all it needs, but has not sent all that the others need."""
    board, right = Board(board_path, world), 0
    layer = make_layer(mode="tp")
    wrong: list[str] = []
    right += checked_call(layer, inputs(rank, 0, tokens=64), wrong)
    set_limit(layer, 0.8)
    if rank == 1:
        arm("stop", "combine", 2 * 64 * world - 15, seconds=0, stamp=board.address(rank, STRUCK))  # seven jobs are left
    kind, text, _ = failure_of(lambda: checked_call(layer, inputs(rank, 1, tokens=64), wrong))
    board.stamp(rank, FAILED)
    assert wrong == []
    time.sleep(0.5)
    return right + (not kind), text


def test_krn_11_a_frozen_rank_does_not_return_what_the_others_gave_up(tmp_path):
    """It could: all rows that it waits for have come. But the call has failed, and all ranks must agree about that."""
    for attempt in range(5):  # a thread that the stop reaches late may send the last jobs: then nobody waits, and nothing is shown
        folder = tmp_path / str(attempt)
        folder.mkdir()
        said = values(run_ranks(3, finish_what_failed, folder=folder,
                                outside=lambda board, ranks: go_on_when_given_up(board, ranks, 1)))
        if min(right for right, _ in said[::2]) == 1:
            break
    else:
        pytest.fail("nobody waited for the rank that was stopped, in five attempts")
    assert said[1][0] == 1 and "rank 1" in said[1][1]


def be_stopped(rank: int, world: int, board_path: str) -> list[str]:
    board, wrong = Board(board_path, world), []
    layer = make_layer()
    checked_call(layer, inputs(rank, 0), wrong)
    set_limit(layer, 0.8)
    if rank == 1:
        arm("delay", "dispatch", 2, seconds=0.4, stamp=0)  # so that the others are waiting when all are stopped
    board.stamp(rank, READY)
    checked_call(layer, inputs(rank, 1), wrong)
    return wrong


def test_time_in_which_everybody_is_stopped_does_not_count(tmp_path):
    """Ctrl-Z and fg, a paused container, a suspended machine: nobody is to blame when all go on."""
    def stop_and_go(board, ranks):
        for rank in range(3):
            assert board.wait(rank, READY, time.monotonic() + 30)
        time.sleep(0.1)
        for what, pause in ((signal.SIGSTOP, 2.0), (signal.SIGCONT, 0.0)):
            for process in ranks.processes:
                os.kill(process.pid, what)
            time.sleep(pause)
    assert values(run_ranks(3, be_stopped, folder=tmp_path, outside=stop_and_go)) == [[], [], []]


def come_late(rank: int, world: int, board_path: str) -> list[str]:
    layer, wrong = make_layer(), []
    checked_call(layer, inputs(rank, 0), wrong)
    set_limit(layer, 2.0)
    for call in range(2):
        if rank == call:
            time.sleep(0.8)
        checked_call(layer, inputs(rank, call), wrong)
    return wrong


def test_late_by_less_than_the_limit(tmp_path):
    assert values(run_ranks(3, come_late, folder=tmp_path)) == [[], [], []]


def wait_at_the_barrier(rank: int, world: int, board_path: str) -> list[str]:
    """Rank 2 computes for longer than the limit for rank 1; rank 0 has nothing to do and is in its next call already."""
    layer, wrong = make_layer(), []
    checked_call(layer, inputs(rank, 0), wrong)
    set_limit(layer, 1.1)
    if rank == 2:
        arm("lag", "gemm1", 1, seconds=0.35, stamp=0)
    begin = time.monotonic()
    checked_call(layer, routed_to(2, world, tokens=96 if rank == 1 else 0), wrong)
    if rank == 2:
        arm("none", "gemm1", 1, seconds=0, stamp=0)
    checked_call(layer, routed_to(2, world, tokens=96 if rank == 1 else 0), wrong)
    return wrong if time.monotonic() - begin > 1.3 else ["the computation was too short to show anything"]


def wait_for_a_rank_that_waits(rank: int, world: int, board_path: str) -> list[str]:
    """Rank 0 waits for rank 1, which moves nothing but waits for the last rows of rank 2, which sends slowly."""
    layer, wrong = make_layer(pull=True), []
    arguments = routed_to(1, world, tokens=96)
    if rank == 2:
        arguments[1][:64] = -1
    checked_call(layer, arguments, wrong)
    set_limit(layer, 1.0)
    if rank == 2:
        arm("lag", "dispatch", 1, seconds=0.5, stamp=0)
    begin = time.monotonic()
    checked_call(layer, arguments, wrong)
    return wrong if time.monotonic() - begin > 1.3 else ["the computation was too short to show anything"]


def compute_long(rank: int, world: int, board_path: str) -> list[str]:
    layer, wrong = make_layer(mode="tp"), []
    checked_call(layer, inputs(rank, 0), wrong)
    set_limit(layer, 1.0)
    if rank == 0:
        arm("lag", "gemm2", 1, seconds=0.12, stamp=0)
    begin = time.monotonic()
    checked_call(layer, inputs(rank, 1), wrong)
    return wrong if time.monotonic() - begin > 1.3 else ["the computation was too short to show anything"]


@pytest.mark.parametrize("job", [compute_long, wait_at_the_barrier, wait_for_a_rank_that_waits])
def test_progress_is_not_a_stall(tmp_path, job):
    """A computation longer than timeout_s, of a rank that finishes items, disturbs nobody: not who waits for it, not who waits
    for somebody who waits for it, not who waits for it in the next call."""
    assert values(run_ranks(3, job, folder=tmp_path)) == [[], [], []]


def call_once_less(rank: int, world: int, board_path: str, stays: bool) -> tuple[str, str, float, list[str]]:
    layer, wrong = make_layer(), []
    for call in range(2):
        checked_call(layer, inputs(rank, call), wrong)
    set_limit(layer, 1.0)
    begin = time.monotonic()
    if rank == 1:
        time.sleep(2.0 if stays else 0.0)
        return "", "", 0.0, wrong
    kind, text, at = failure_of(lambda: layer(*inputs(rank, 2)))
    time.sleep(1.0)  # the answer must not depend on this rank's end
    return kind, text, at - begin, wrong


@pytest.mark.parametrize("stays", [True, False])
def test_krn_08_one_call_less(tmp_path, stays):
    """A rank that skips a call is named: by a time-out while it lives, at once when it has left."""
    outcomes = values(run_ranks(4, call_once_less, stays, folder=tmp_path))
    assert outcomes.pop(1)[3] == []
    for kind, text, seconds, wrong in outcomes:
        assert (kind, wrong) == ("ProtocolTimeout" if stays else "PeerLost", []), text
        assert ("missing rank 1." if stays else "rank 1 died") in text
        assert seconds < 1.0 + STALL_LIMIT_S


def swap_layers(rank: int, world: int, board_path: str, shared: bool) -> list[tuple[str, str, float]]:
    sizes = {} if shared else {"segments": 2}
    first, second = make_layer(), make_layer(**sizes)
    wrong: list[str] = []
    for call, layer in enumerate((first, second)):
        checked_call(layer, inputs(rank, call), wrong)
        set_limit(layer, 1.0)
    order = (first, second) if rank == 0 else (second, first)
    heard = []
    for layer in order:
        begin = time.monotonic()
        kind, text, at = failure_of(lambda layer=layer: layer(*inputs(rank, 3)))
        heard.append((kind, text, at - begin))
    first.timeout_s = second.timeout_s = 20.0
    if shared:
        for call, layer in enumerate((first, second)):
            checked_call(layer, inputs(rank, 4 + call), wrong)
    assert wrong == []
    return heard


def test_two_layers_of_one_workspace_in_different_order(tmp_path):
    """Nothing is computed, nothing is lost: the same error at once on all ranks, and both layers work afterwards."""
    for heard in values(run_ranks(2, swap_layers, True, folder=tmp_path)):
        for kind, text, seconds in heard:
            assert kind == "MoETkError" and "ranks disagree about the call" in text and seconds < 1.0


def test_two_layers_of_two_workspaces_in_different_order(tmp_path):
    """The ranks are in different memory and cannot compare; the limit ends it, naming the rank that is elsewhere."""
    for rank, heard in enumerate(values(run_ranks(2, swap_layers, False, folder=tmp_path))):
        (kind, text, seconds), (_, later, quickly) = heard
        assert kind == "ProtocolTimeout" and f"missing rank {1 - rank}." in text and "the same call" in text
        assert seconds < 1.0 + STALL_LIMIT_S
        assert later and quickly < 1.0 + STALL_LIMIT_S


def compile_long(rank: int, world: int, board_path: str) -> tuple[str, str, list[str]]:
    host_module, wrong = sessions.host_module, []

    def slow() -> object:
        if rank == 0:
            time.sleep(1.5)
        return host_module()
    sessions.host_module = slow

    def first_call() -> None:
        checked_call(make_layer(timeout_s=1.0), inputs(rank, 0), wrong)
    return (*failure_of(first_call)[:2], wrong)


@pytest.mark.parametrize(("limit", "enough"), [("20", True), ("0.7", False)])
def test_krn_10_compiling_is_not_charged(tmp_path, monkeypatch, limit, enough):
    """One rank compiles for longer than timeout_s. The set-up has its own limit and ends with all ranks together."""
    monkeypatch.setenv("MOE_TK_FIRST_CALL_TIMEOUT_S", limit)
    for rank, (kind, text, wrong) in enumerate(values(run_ranks(2, compile_long, folder=tmp_path))):
        if enough:
            assert (kind, wrong) == ("", []), text
        elif rank == 1:
            assert kind == "ProtocolTimeout" and "waited 0.7 s" in text
