"""Scenarios of the fault tests: who is struck, where and how, drawn from a seed if wanted, and what each rank must say then."""

from __future__ import annotations

import random
import signal
from dataclasses import dataclass, field

from moe_tk.errors import PeerLost, ProtocolTimeout
from moe_tk.runtime.launcher import Outcome

FAULT_PHASES = ("exchange", "dispatch", "gemm1", "gemm2", "combine", "reduce", "barrier")
DEATH_LIMIT_S = 1.0   # from a death to the error on every survivor
STALL_LIMIT_S = 1.0   # from the end of the time limit to the error
LONG_S = 30.0         # a time limit that no test may come near


@dataclass(frozen=True)
class Scenario:
    """One fault. `point` counts from 1: the n-th fault point of `phase` that the victim comes to after `calls_before` calls.

    action  kill | stop | delay | lag  at that point (in the native module)
            raise | exit   in Python, between exchange and launch
            kill_outside   SIGKILL `seconds` after the victim is ready, whatever it does then
    seconds length of the stop, the delay, or of each lag
    """

    world: int = 3
    pattern: str = "mega"
    mode: str = "ep"
    pull: bool = False
    segments: int = 1
    phase: str = "dispatch"
    point: int = 1
    victim: int = 1
    action: str = "kill"
    seconds: float = 0.0
    timeout_s: float = LONG_S
    calls_before: int = 1
    calls_after: int = 4
    seed: int = 0

    @property
    def deadly(self) -> bool:
        return self.action in ("kill", "kill_outside", "exit")

    @property
    def harmless(self) -> bool:
        """True if every call must succeed."""
        return self.action in ("delay", "lag") or (self.action == "stop" and self.seconds < self.timeout_s)

    def survivors(self) -> list[int]:
        """Ranks that can form the next group."""
        return [rank for rank in range(self.world) if not (self.deadly and rank == self.victim)]


@dataclass
class Account:
    """What one rank saw. error_at and the board's stamps are seconds of the same monotonic clock."""

    right_calls: int = 0
    wrong: list[str] = field(default_factory=list)  # results that were handed out and are not right
    error: str = ""          # class name of what ended the calls
    text: str = ""
    error_at: float = 0.0
    records: list[dict] = field(default_factory=list)
    refusal: str = ""        # what a further call said
    rebuilt: str = ""        # "right" if a new group and a new layer work


def judge_dead(rank: int, scenario: Scenario, outcome: Outcome) -> list[str]:
    if scenario.action == "exit":
        return [] if "SystemExit" in (outcome.error or "") else [f"rank {rank} should have left, but: {outcome}"]
    return [] if outcome.exit_code == -signal.SIGKILL else [f"rank {rank} should have been killed, but: {outcome}"]


def judge(rank: int, scenario: Scenario, account: Account, struck: float) -> list[str]:
    problems = list(account.wrong)
    if scenario.harmless:
        wanted = scenario.calls_before + scenario.calls_after
        if account.error or account.right_calls != wanted:
            problems.append(f"{account.right_calls} of {wanted} calls were right, then {account.error}: {account.text}")
        return problems
    if scenario.action == "raise" and rank == scenario.victim:
        return problems + ([] if account.error == "ValueError" else [f"its own error came out as {account.error}"])
    if not account.error:
        return [*problems, "saw no error"]
    problems += _judge_error(rank, scenario, account, account.error_at - struck)
    if account.text.split(" Who waited")[0][:60] not in account.refusal:
        problems.append(f"a further call said: {account.refusal}")
    if account.rebuilt != "right":
        problems.append(f"the new group: {account.rebuilt}")
    return problems


def _judge_error(rank: int, scenario: Scenario, account: Account, latency: float) -> list[str]:
    """The class, the words and the moment of a survivor's error."""
    name = f"rank {scenario.victim}"
    if scenario.deadly and scenario.action != "exit":
        wanted, limit, words = PeerLost, DEATH_LIMIT_S, [f"{name} died"]
    elif scenario.action in ("raise", "exit"):
        wanted, limit, words = ProtocolTimeout, DEATH_LIMIT_S, [f"{name} raised"]
    elif rank == scenario.victim:
        right = account.error == "ProtocolTimeout"
        return [] if right else [f"stopped beyond the limit, it raised {account.error}: {account.text}"]
    else:
        wanted, limit, words = ProtocolTimeout, scenario.timeout_s + STALL_LIMIT_S, [f"missing {name}."]
        words += ["waited", " s for ", "phase", "timeout_s"]
    problems = [] if account.error == wanted.__name__ else [f"raised {account.error}: {account.text}"]
    problems += [f"its error does not say {word!r}: {account.text}" for word in ["moe_layer", *words] if word not in account.text]
    if latency > limit:
        problems.append(f"its error came {latency:.2f} s after the fault, limit {limit:.2f} s")
    return problems


def random_scenario(seed: int) -> Scenario:
    """The scenario of a seed: world, pattern, mode, phase, victim, action and moment are all drawn from it."""
    draw = random.Random(seed)
    world = draw.randint(2, 8)
    action = draw.choice(("kill", "kill", "kill_outside", "stop", "stop", "delay", "raise", "exit"))
    phase = draw.choice(FAULT_PHASES)
    points = {"exchange": world, "barrier": world, "reduce": 4, "gemm1": 6, "gemm2": 6}
    stop_s, limit = draw.choice(((0.3, 1.5), (1.1, 1.0)))
    seconds = {"kill_outside": draw.random() * 0.06, "stop": stop_s, "delay": 0.4}.get(action, 0.0)
    return Scenario(world=world, pattern=draw.choice(("mega", "two_kernel")), mode=draw.choice(("ep", "tp")),
                    pull=draw.random() < 0.3, segments=draw.choice((1, 2)), phase=phase,
                    point=draw.randint(1, points.get(phase, 20)), victim=draw.randrange(world), action=action, seconds=seconds,
                    timeout_s={"stop": limit, "delay": 1.5}.get(action, LONG_S), calls_before=draw.randint(1, 3),
                    calls_after=40 if action == "kill_outside" else 4, seed=seed)
