"""The laboratory of the fault tests: ranks that run a small layer, a fault that strikes one of them, and what each rank says.

play() starts the ranks, strikes, collects every rank's account and judges it:
survivors must fail in time with the right error or return right results, refuse further calls, and be able to form a new
group; no process and no shared memory may stay. What was wrong comes back as sentences, so that a benchmark can count them.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from fault_scenarios import LONG_S, Account, Scenario, judge, judge_dead

import moe_tk
from moe_tk.errors import MoETkError
from moe_tk.runtime import calls as call_steps
from moe_tk.runtime.faults import PHASES
from moe_tk.runtime.host import host_module
from moe_tk.runtime.launcher import Outcome, RankProcesses
from moe_tk.schedule.ownership import expert_range
from moe_tk.weights import shard_weights

ACTIONS = {"none": 0, "kill": 1, "stop": 2, "delay": 3, "lag": 4}  # fault_points::action
EXPERTS, TOP_K, HIDDEN, INTERMEDIATE, MOST_TOKENS = 12, 2, 32, 48, 96
TOLERANCE = 1e-5      # relative error of a float32 result against the float64 reference

STRUCK, FAILED, READY, ENDED = range(4)  # columns of the board


@dataclass
class Verdict:
    """The judged scenario. latencies_s: seconds from the strike to the error, by rank."""

    scenario: Scenario
    problems: list[str]
    latencies_s: dict[int, float]
    errors: dict[int, str]
    texts: dict[int, str]
    took_s: float = 0.0

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self.scenario), "problems": self.problems, "errors": self.errors,
                "latencies_s": {rank: round(value, 3) for rank, value in self.latencies_s.items()},
                "took_s": round(self.took_s, 2)}


class Board:
    """Shared stamps (seconds of the monotonic clock, 0 = not yet), one row per rank, that outlive the death of a rank."""

    def __init__(self, path: str | Path, world: int, *, create: bool = False) -> None:
        self._stamps = np.memmap(path, dtype=np.uint64, mode="w+" if create else "r+", shape=(world, 8))

    def at(self, rank: int, column: int) -> float:
        return float(self._stamps[rank, column]) * 1e-9

    def stamp(self, rank: int, column: int) -> None:
        self._stamps[rank, column] = time.monotonic_ns()

    def clear(self, rank: int, column: int) -> None:
        self._stamps[rank, column] = 0

    def address(self, rank: int, column: int) -> int:
        return self._stamps.ctypes.data + (rank * 8 + column) * 8

    def wait(self, rank: int, column: int, until: float) -> float:
        """The stamp once it is there, or 0.0 at `until`."""
        while not self.at(rank, column) and time.monotonic() < until:
            time.sleep(0.001)
        return self.at(rank, column)


def full_weights() -> tuple[torch.Tensor, torch.Tensor]:
    """w13 [E, 2I, H] and w2 [E, H, I], the same on all ranks."""
    make = torch.Generator().manual_seed(7)
    return (torch.randn(EXPERTS, 2 * INTERMEDIATE, HIDDEN, generator=make) / 6,
            torch.randn(EXPERTS, HIDDEN, INTERMEDIATE, generator=make) / 7)


def make_layer(*, pattern: str = "mega", mode: str = "ep", timeout_s: float = LONG_S, **options: Any) -> moe_tk.MoELayer:
    """The layer of all tests here on the default group, with its weights."""
    layer = moe_tk.MoELayer(num_experts=EXPERTS, top_k=TOP_K, hidden_size=HIDDEN, intermediate_size=INTERMEDIATE,
                            max_tokens_per_rank=MOST_TOKENS, mode=mode, pattern=pattern, dtype=torch.float32, timeout_s=timeout_s,
                            **options)
    layer.load_weights(*shard_weights(*full_weights(), mode=mode, world=layer.group.world, rank=layer.group.rank))
    return layer


def set_limit(layer: moe_tk.MoELayer, seconds: float) -> None:
    """Sets timeout_s when all ranks are there: on a busy machine they start at different times, which is not the test."""
    dist.barrier()
    layer.timeout_s = seconds


def inputs(rank: int, call: int, seed: int = 0, tokens: int | None = None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """hidden_states [T, H], topk_ids [T, k], topk_weights [T, k] of one call; T differs from rank to rank and call to call."""
    make = torch.Generator().manual_seed(1000 * seed + 100 * call + rank)
    if tokens is None:
        tokens = int(torch.randint(MOST_TOKENS // 2, MOST_TOKENS + 1, (), generator=make))
    ids = torch.rand(tokens, EXPERTS, generator=make).argsort(dim=1)[:, :TOP_K].int().contiguous()
    return torch.randn(tokens, HIDDEN, generator=make), ids, torch.rand(tokens, TOP_K, generator=make)


def routed_to(owner: int, world: int, *, tokens: int, rank: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As inputs(), with all tokens going to the first two experts of rank `owner` (EP)."""
    hidden, ids, weights = inputs(rank, 0, tokens=tokens)
    ids[:] = torch.tensor([0, 1], dtype=torch.int32) + expert_range(EXPERTS, world, owner)[0]
    return hidden, ids, weights


def checked_call(layer: moe_tk.MoELayer, arguments: tuple, wrong: list[str], *, name: str = "call") -> bool:
    """One call into a poisoned `out`; True if the result is right, else a sentence is added to `wrong`."""
    out = torch.full_like(arguments[0], float("nan"))
    result = layer(*arguments, out=out)
    error = moe_tk.reference.relative_error(result, moe_tk.reference.moe_layer(*arguments, *full_weights()))
    if not error < TOLERANCE:
        wrong.append(f"{name} returned a wrong result: relative error {error}")
    return not wrong


def arm(action: str, phase: str, point: int, *, seconds: float, stamp: int) -> None:
    """Sets the fault of this process; needs the variant of the module that has fault points."""
    host_module().arm_fault(action=ACTIONS[action], phase=PHASES.index(phase), point=point, delay_s=seconds, stamp=stamp)


def _strike_in_python(scenario: Scenario, board: Board) -> None:
    build_tables = call_steps.build_tables

    def struck(*_: Any, **__: Any) -> None:
        call_steps.build_tables = build_tables
        board.stamp(scenario.victim, STRUCK)
        if scenario.action == "exit":
            raise SystemExit(3)
        raise ValueError("the test's own error")
    call_steps.build_tables = struck


def _set_fault(scenario: Scenario, board: Board) -> None:
    if scenario.action in ("raise", "exit"):
        _strike_in_python(scenario, board)
    elif scenario.action != "kill_outside":
        arm(scenario.action, scenario.phase, scenario.point, seconds=scenario.seconds, stamp=board.address(scenario.victim, STRUCK))


def rebuild(survivors: list[int], old_rank: int, store: str, *, mode: str = "ep", pattern: str = "mega", seed: int = 0) -> str:
    """Forms a new group of the survivors and runs a new layer on it: "right", or what went wrong."""
    dist.destroy_process_group()
    rank, world = survivors.index(old_rank), len(survivors)
    dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world, timeout=timedelta(seconds=20))
    wrong: list[str] = []
    layer = make_layer(pattern=pattern, mode=mode, timeout_s=20.0)
    for call in range(2):
        checked_call(layer, inputs(rank, call, seed), wrong, name="a call of the new layer")
    return wrong[0] if wrong else "right"


def run_rank(rank: int, world: int, scenario: Scenario, board_path: str, store: str) -> Account:
    """One rank of a scenario."""
    os.environ["MOE_TK_RECORD_DIR"] = str(Path(store).parent)
    board, account = Board(board_path, world), Account()
    layer = make_layer(pattern=scenario.pattern, mode=scenario.mode, pull=scenario.pull, segments=scenario.segments)
    call = 0
    try:
        for call in range(scenario.calls_before + scenario.calls_after):
            if call == scenario.calls_before:
                set_limit(layer, scenario.timeout_s)
                board.stamp(rank, READY)
                if rank == scenario.victim:
                    _set_fault(scenario, board)
            account.right_calls += checked_call(layer, inputs(rank, call, scenario.seed), account.wrong, name=f"call {call}")
    except Exception as error:
        account.error_at = time.monotonic()
        account.error, account.text = type(error).__name__, str(error)
        account.records = getattr(error, "records", [])
        board.stamp(rank, FAILED)
        try:
            layer(*inputs(rank, call + 1, scenario.seed))
            account.refusal = "it was accepted"
        except MoETkError as refusal:
            account.refusal = str(refusal)
    board.stamp(rank, ENDED)
    if account.error:
        account.rebuilt = rebuild(scenario.survivors(), rank, f"{store}-rebuilt", mode=scenario.mode, pattern=scenario.pattern)
    return account


def start_ranks(world: int, target: Callable, *args: Any, timeout_s: float) -> RankProcesses:
    """Ranks whose module has fault points; this process goes on with the module that it has."""
    os.environ["MOE_TK_FAULT_POINTS"] = "1"
    try:
        return RankProcesses(world, target, *args, timeout_s=timeout_s)
    finally:
        del os.environ["MOE_TK_FAULT_POINTS"]


def run_ranks(world: int, target: Callable, *args: Any, folder: Path, outside: Callable | None = None,
              timeout_s: float = 60.0) -> list[Outcome]:
    """Outcomes of ranks that run target(rank, world, board path, *args); outside(board, ranks) is called while they run.

    Asserts that no process and no shared memory is left.
    """
    board = Board(folder / "board", world, create=True)
    with start_ranks(world, target, str(folder / "board"), *args, timeout_s=timeout_s) as ranks:
        pids = [process.pid for process in ranks.processes]
        if outside is not None:
            outside(board, ranks)
        outcomes = ranks.outcomes()
    assert leftovers(pids) == []
    return outcomes


def go_on_when_given_up(board: Board, ranks: RankProcesses, victim: int, *, at_least: float = 0.0, wait: bool = True) -> None:
    """Continues a rank that has stopped itself: after at_least seconds and, if `wait`, when the others have stamped FAILED."""
    until = time.monotonic() + 30.0
    struck = board.wait(victim, STRUCK, until)
    time.sleep(max(0.0, struck + at_least - time.monotonic()))
    for rank in range(ranks.world if wait else 0):
        if rank != victim:
            board.wait(rank, FAILED, until)
    os.kill(ranks.processes[victim].pid, signal.SIGCONT)


def values(outcomes: list[Outcome]) -> list[Any]:
    """What the ranks returned; fails with the traceback of the first that did not."""
    for rank, outcome in enumerate(outcomes):
        assert outcome.error is None, f"rank {rank}: {outcome.error}"
    return [outcome.value for outcome in outcomes]


def failure_of(call: Callable[[], Any]) -> tuple[str, str, float]:
    """(class, text, moment) of what call() raises; ("", "", moment) if it does not."""
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic()
    return "", "", time.monotonic()


def _act_from_outside(scenario: Scenario, board: Board, ranks: RankProcesses) -> None:
    """What the victim cannot do itself: dying at any moment, being continued."""
    pid, until = ranks.processes[scenario.victim].pid, time.monotonic() + 60.0
    if scenario.action == "kill_outside":
        board.wait(scenario.victim, READY, until)
        time.sleep(scenario.seconds)
        board.stamp(scenario.victim, STRUCK)
        os.kill(pid, signal.SIGKILL)
    if scenario.action == "stop":
        go_on_when_given_up(board, ranks, scenario.victim, at_least=scenario.seconds, wait=not scenario.harmless)


def play(scenario: Scenario, folder: Path) -> Verdict:
    """Runs a scenario in `folder` (new, empty) and judges it."""
    begin = time.monotonic()
    board = Board(folder / "board", scenario.world, create=True)
    with start_ranks(scenario.world, run_rank, scenario, str(folder / "board"), str(folder / "store"), timeout_s=90.0) as ranks:
        pids = [process.pid for process in ranks.processes]
        _act_from_outside(scenario, board, ranks)
        outcomes = ranks.outcomes()
    struck = board.at(scenario.victim, STRUCK)
    problems = [] if struck else ["the fault did not strike"]
    accounts: dict[int, Account] = {}
    for rank, outcome in enumerate(outcomes):
        if rank == scenario.victim and scenario.deadly:
            problems += judge_dead(rank, scenario, outcome)
        elif outcome.error is not None:
            problems.append(f"rank {rank} ended badly: {outcome.error.strip().splitlines()[-1]}")
        else:
            accounts[rank] = outcome.value
            problems += [f"rank {rank}: {text}" for text in judge(rank, scenario, outcome.value, struck)]
    problems += leftovers(pids)
    return Verdict(scenario=scenario, problems=problems,
                   latencies_s={rank: a.error_at - struck for rank, a in accounts.items() if a.error},
                   errors={rank: a.error for rank, a in accounts.items()}, texts={rank: a.text for rank, a in accounts.items()},
                   took_s=time.monotonic() - begin)


def leftovers(pids: list[int]) -> list[str]:
    """Processes that still run and shared-memory names that are still there."""
    alive = [f"process {pid} is still there" for pid in pids if Path(f"/proc/{pid}").exists()]
    names = [path.name for path in Path("/dev/shm").glob("moe_tk*") if {str(pid) for pid in pids} & set(path.name.split("."))]
    return alive + [f"/dev/shm/{name} is still there" for name in names]
