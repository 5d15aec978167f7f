"""Ranks that die: every survivor hears of it within a second of the death, by name, and can go on in a new group."""

from __future__ import annotations

import gc
import itertools
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
import torch
from fault_lab import (
    READY,
    STRUCK,
    Board,
    arm,
    checked_call,
    failure_of,
    inputs,
    leftovers,
    make_layer,
    play,
    rebuild,
    routed_to,
    run_ranks,
    values,
)
from fault_scenarios import DEATH_LIMIT_S, FAULT_PHASES, Scenario

import moe_tk
from moe_tk.memory import shm
from moe_tk.runtime import session as sessions
from moe_tk.runtime import watch as watches


@pytest.mark.parametrize("phase", FAULT_PHASES)
@pytest.mark.parametrize(("world", "pattern", "mode", "pull"), [(3, "mega", "ep", False), (2, "two_kernel", "tp", True)])
def test_krn_11_killed_in_a_phase(tmp_path, phase, world, pattern, mode, pull):
    """SIGKILL half-way through a phase: PeerLost everywhere, no partial result, a new group of the survivors works."""
    verdict = play(Scenario(world=world, pattern=pattern, mode=mode, pull=pull, phase=phase, point=2, victim=world - 1), tmp_path)
    assert verdict.problems == []


@pytest.mark.parametrize("seconds", [0.0, 0.007])
def test_krn_11_killed_at_any_moment(tmp_path, seconds):
    verdict = play(Scenario(world=4, action="kill_outside", seconds=seconds, calls_after=200, victim=2), tmp_path)
    assert verdict.problems == []


def test_krn_11_killed_under_the_serial_pattern(tmp_path):
    verdict = play(Scenario(world=4, pattern="serial", action="kill_outside", seconds=0.01, calls_after=200), tmp_path)
    assert verdict.problems == []


def die_one_after_the_other(rank: int, world: int, board_path: str, store: str) -> list[float]:
    """The last rank dies, the others form a new group, until one is left. Returns the latencies of this rank."""
    board, wrong, latencies = Board(board_path, world), [], []
    layer = make_layer()
    for left in range(world - 1, 0, -1):
        checked_call(layer, inputs(rank, left), wrong)
        if rank == left:
            arm("kill", "combine", 3, seconds=0, stamp=board.address(rank, STRUCK))
        kind, text, at = failure_of(lambda layer=layer, left=left: [layer(*inputs(rank, left + call)) for call in range(3)])
        assert kind == "PeerLost" and f"rank {left} died" in text, text
        latencies.append(at - board.at(left, STRUCK))
        begin = time.monotonic()
        kind, text, at = failure_of(make_layer)  # the old group must say so, not hang
        assert kind == "PeerLost" and at - begin < DEATH_LIMIT_S, text
        assert rebuild(list(range(left)), rank, f"{store}-{left}") == "right"
        layer = make_layer()
        x = torch.ones(2, 8)
        assert torch.equal(moe_tk.ops.ag_gemm(x, x), torch.full((2 * left, 2), 8.0))
        gc.collect()
        watches_now = sum(thread.name == "moe_tk liveness" for thread in threading.enumerate())
        assert watches_now == len(sessions._live) == 3  # of the layer and of the op: its lobby and its data
    assert wrong == []
    return latencies


def test_sym_08_group_after_group(tmp_path):
    """Four lives of one process, each with a smaller group; old layers, sessions and watches are gone each time."""
    outcomes = run_ranks(4, die_one_after_the_other, str(tmp_path / "store"), folder=tmp_path)
    assert [outcome.exit_code for outcome in outcomes[1:]] == [-signal.SIGKILL] * 3
    assert len(outcomes[0].value) == 3, outcomes[0]
    assert max(outcomes[0].value) < DEATH_LIMIT_S


def two_die(rank: int, world: int, board_path: str, store: str) -> tuple[str, str, float, str]:
    board, wrong, call = Board(board_path, world), [], itertools.count()
    layer = make_layer()
    checked_call(layer, inputs(rank, next(call)), wrong)
    board.stamp(rank, READY)
    kind, text, at = failure_of(lambda: [checked_call(layer, inputs(rank, next(call)), wrong) for _ in range(1000)])
    assert wrong == []
    return kind, text, at - board.at(1, STRUCK), rebuild([0, 2, 4], rank, store)


def test_two_ranks_die_at_once(tmp_path):
    def kill_two(board, ranks):
        for rank in range(5):
            assert board.wait(rank, READY, time.monotonic() + 30)
        board.stamp(1, STRUCK)
        for rank in (1, 3):
            os.kill(ranks.processes[rank].pid, signal.SIGKILL)
    outcomes = run_ranks(5, two_die, str(tmp_path / "store"), folder=tmp_path, outside=kill_two)
    assert [outcomes[rank].exit_code for rank in (1, 3)] == [-signal.SIGKILL] * 2
    for kind, text, latency, rebuilt in values(outcomes[::2]):
        assert kind == "PeerLost" and re.search("rank 1 died|rank 3 died|ranks 1, 3 died", text), text
        assert latency < DEATH_LIMIT_S and rebuilt == "right"


def die_in_set_up(rank: int, world: int, board_path: str, step: str) -> tuple[str, str, float]:
    board = Board(board_path, world)

    def die(*_, **__):
        board.stamp(rank, STRUCK)
        os.kill(os.getpid(), signal.SIGKILL)

    if rank == 2:
        place, name = {"compile": (sessions, "host_module"), "allocate": (shm.ShmHeap, "_check_offers"),
                       "map": (shm.ShmHeap, "_map_all"), "watch": (watches, "own_process")}[step]
        setattr(place, name, die)
    kind, text, at = failure_of(make_layer)
    assert shm.SHM_DIR.exists()
    time.sleep(DEATH_LIMIT_S)  # stays: the others must not learn of the death by this rank's end
    return kind, text, at - board.at(2, STRUCK)


@pytest.mark.parametrize("step", ["compile", "allocate", "map", "watch"])
def test_sym_09_killed_in_the_set_up(tmp_path, step):
    """Only the neighbours of a dead rank see their connection to it break; the others must hear of it too."""
    outcomes = run_ranks(5, die_in_set_up, step, folder=tmp_path)
    assert outcomes.pop(2).exit_code == -signal.SIGKILL
    for kind, text, latency in values(outcomes):
        assert kind == "PeerLost" and re.search("rank 2 died|lost its connection", text), text
        assert latency < DEATH_LIMIT_S, text


def leave_early(rank: int, world: int, board_path: str, how: str) -> list[str]:
    """Rank 0 has no tokens and no work, and leaves; rank 2 computes long for rank 1."""
    wrong: list[str] = []
    layer = make_layer(timeout_s=5.0)
    checked_call(layer, inputs(rank, 0), wrong)
    if rank == 2:
        arm("lag", "gemm1", 1, seconds=0.1, stamp=0)
    checked_call(layer, routed_to(2, world, tokens=64 if rank == 1 else 0), wrong)
    if rank == 0 and how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    return wrong


@pytest.mark.parametrize("how", ["normal", "killed"])
def test_a_rank_that_is_done_may_leave(tmp_path, how):
    """The end of a rank that owes nothing is no PeerLost for those that are still at work."""
    outcomes = run_ranks(3, leave_early, how, folder=tmp_path)
    assert values(outcomes[1:]) == [[], []]
    assert outcomes[0].exit_code == (0 if how == "normal" else -signal.SIGKILL)


def fork_and_lose(rank: int, world: int, board_path: str) -> tuple[list[str], float]:
    board, wrong = Board(board_path, world), []
    layer = make_layer()
    checked_call(layer, inputs(rank, 0), wrong)
    if rank == 1:
        board.wait(0, READY, time.monotonic() + 30)
        time.sleep(0.3)
        board.stamp(1, STRUCK)
        os.kill(os.getpid(), signal.SIGKILL)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(write, failure_of(lambda: layer(*inputs(rank, 1)))[1].encode())
        del layer
        gc.collect()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert "forked" in os.read(read, 4096).decode()
    board.stamp(0, READY)
    kind, text, at = failure_of(lambda: layer(*inputs(rank, 1)))
    assert kind == "PeerLost", text
    return wrong, at - board.at(1, STRUCK)


def test_a_forked_child_leaves_the_watch_alone(tmp_path):
    """A child that drops its copy of a layer once stopped the watch of its parent; a call from a child would corrupt the rank."""
    outcomes = run_ranks(2, fork_and_lose, folder=tmp_path)
    wrong, latency = values(outcomes[:1])[0]
    assert wrong == [] and latency < DEATH_LIMIT_S


def late_watch(rank: int, world: int, board_path: str) -> str:
    board, noted = Board(board_path, world), []
    if rank == 1:
        watches.os.pidfd_open = lambda pid: time.sleep(30)  # is still in the set-up when it is killed
    else:
        pidfd_open = os.pidfd_open

        def open_late(pid: int) -> int:
            board.stamp(0, READY)
            board.wait(1, STRUCK, time.monotonic() + 30)
            time.sleep(0.2)
            return pidfd_open(pid)
        watches.os.pidfd_open = open_late
    from moe_tk.group import resolve_group
    watch = watches.LivenessWatch(resolve_group(), noted.append, timeout_s=30)
    watch.close()
    return f"{noted} {watch.dead} {watch.unwatched}"


def test_a_death_before_the_watch_begins_is_seen(tmp_path):
    """Killed between telling its name and being watched: a zombie or no process at all, and neither is 'cannot be watched'."""
    def kill_in_time(board, ranks):
        assert board.wait(0, READY, time.monotonic() + 30)
        os.kill(ranks.processes[1].pid, signal.SIGKILL)
        board.stamp(1, STRUCK)
    outcomes = run_ranks(2, late_watch, folder=tmp_path, outside=kill_in_time)
    assert values(outcomes[:1]) == ["[1] {1} []"]


def wait_long(rank: int, world: int, board_path: str) -> None:
    Board(board_path, world).stamp(rank, READY)
    time.sleep(60)


LAUNCHING = """
    import sys
    from moe_tk.runtime.launcher import RankProcesses
    from test_faults_death import wait_long
    if __name__ == "__main__":
        with RankProcesses(2, wait_long, sys.argv[1]) as ranks:
            print(*(process.pid for process in ranks.processes), flush=True)
            ranks.outcomes()
"""


def in_new_python(text: str, *arguments: str, folder: Path) -> subprocess.Popen:
    """A Python process that runs `text` and can import this folder and the package."""
    here = Path(__file__).parent
    script = folder / "script.py"
    script.write_text(textwrap.dedent(text))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(here), str(here.parents[1])])}
    return subprocess.Popen([sys.executable, str(script), *arguments], env=environment, stdout=subprocess.PIPE,
                            stderr=subprocess.STDOUT, text=True)


def test_ranks_end_with_their_launcher(tmp_path):
    """A launcher that is killed cannot clean up; its ranks must not stay."""
    board = Board(tmp_path / "board", 2, create=True)
    launcher = in_new_python(LAUNCHING, str(tmp_path / "board"), folder=tmp_path)
    try:
        pids = [int(word) for word in launcher.stdout.readline().split()]
        assert all(board.wait(rank, READY, time.monotonic() + 60) for rank in range(2))
    finally:
        launcher.kill()
    launcher.wait()
    until = time.monotonic() + 10
    while leftovers(pids) and time.monotonic() < until:
        time.sleep(0.05)
    assert leftovers(pids) == []


EXITING = """
    import os, sys, threading, time
    import torch, torch.distributed as dist
    from fault_lab import Board, STRUCK, READY, checked_call, failure_of, inputs, make_layer
    rank, folder = int(sys.argv[1]), sys.argv[2]
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", store=dist.FileStore(folder + "/store", 2), rank=rank, world_size=2)
    board, wrong = Board(folder + "/board", 2), []
    layer = make_layer()
    checked_call(layer, inputs(rank, 0), wrong)
    if rank == 1:  # is in a call, in another thread, when its interpreter ends
        threading.Thread(target=lambda: layer(*inputs(rank, 1)), daemon=True).start()
        time.sleep(0.3)
        board.stamp(1, STRUCK)
        sys.exit(3)
    board.wait(1, STRUCK, time.monotonic() + 30)
    time.sleep(0.3)
    kind, text, at = failure_of(lambda: [layer(*inputs(rank, call)) for call in (1, 2)])
    print(kind, at, wrong, text, flush=True)
"""


def exit_from_a_thread(rank: int, world: int, board_path: str) -> tuple[str, float]:
    board, wrong = Board(board_path, world), []
    layer = make_layer()
    checked_call(layer, inputs(rank, 0), wrong)
    if rank == 1:
        threading.Thread(target=lambda: (time.sleep(0.3), board.stamp(1, STRUCK), os._exit(3))).start()
        layer(*inputs(rank, 1))
    board.wait(1, STRUCK, time.monotonic() + 30)
    time.sleep(0.1)
    kind, text, at = failure_of(lambda: layer(*inputs(rank, 1)))
    assert kind == "PeerLost" and "rank 1 died" in text and wrong == []
    return text, at - board.at(1, STRUCK)


def test_os_exit_in_the_middle(tmp_path):
    """os._exit while a call waits in another thread: nobody is told by the one that leaves."""
    outcomes = run_ranks(2, exit_from_a_thread, folder=tmp_path)
    assert outcomes[1].exit_code == 3
    assert values(outcomes[:1])[0][1] < DEATH_LIMIT_S


def test_interpreter_exit_in_the_middle(tmp_path):
    """sys.exit while a call waits in another thread: the end is clean, and no hang for the other rank."""
    Board(tmp_path / "board", 2, create=True)
    processes = [in_new_python(EXITING, str(rank), str(tmp_path), folder=tmp_path) for rank in range(2)]
    try:
        processes[1].wait(timeout=60)
        ended = time.monotonic()
        said = [process.communicate(timeout=60)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert processes[1].returncode == 3, said[1]
    kind, moment, wrong = said[0].split()[:3]
    assert kind == "PeerLost" or (kind == "ProtocolTimeout" and "its program ended" in said[0]), said[0]
    assert wrong == "[]" and "rank 1" in said[0], said[0]
    assert float(moment) - ended < DEATH_LIMIT_S
    assert "terminate" not in said[1] and "Fatal" not in said[1], said[1]
    assert leftovers([process.pid for process in processes]) == []
