"""Who did what when: a trace as rows of letters, one row per rank and block, time to the right."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from moe_tk.demo.overlap import BEGIN, END, PHASE, READY

LETTERS = {"dispatch": "d", "gemm1": "1", "gemm2": "2", "combine": "c", "reduce": "r"}
MOVING = ("dispatch", "combine", "reduce")
WAITING, NOTHING = ".", " "
LAUNCH_ROLES = {"mega": (("send", "place", "compute", "combine"),),
                "two_kernel": (("send", "place", "compute"), ("compute", "combine"))}


@dataclass(frozen=True)
class Lane:
    """One block of one rank. letters[i] is what it did in the i-th slot of time, full[i] whether that filled half of it."""

    rank: int
    name: str          # the role in which the block starts
    letters: str
    full: list[bool]


@dataclass(frozen=True)
class Picture:
    """All lanes of a call on one axis of `slots` slots from begin_ns to end_ns."""

    begin_ns: int
    end_ns: int
    slots: int
    lanes: list[Lane]

    @property
    def milliseconds(self) -> float:
        return (self.end_ns - self.begin_ns) * 1e-6


def draw(pattern: str, traces: Sequence[Sequence[tuple]], starting_roles: Sequence[str], begin_ns: int, end_ns: int,
         slots: int) -> Picture:
    """The picture of one call of a fused pattern.

    traces          per rank, as in CallStats.trace
    starting_roles  of the blocks of a launch that has all roles, by block

    A slot shows what the block moved in it, if anything, however short, since rows are moved in moments; else the GEMM on
    which it worked longer; else "." if it waited; else " ".
    """
    width = max(1, end_ns - begin_ns) / slots
    names, lanes = _names(starting_roles), []
    for rank, trace in enumerate(traces):
        events: list[list[tuple]] = [[] for _ in names]
        for event in trace:
            events[_lane_of_block(pattern, event[0], starting_roles)[event[1]]].append(event)
        lanes += [_lane(rank, name, mine, begin_ns, width, slots) for name, mine in zip(names, events, strict=True)]
    return Picture(begin_ns, end_ns, slots, lanes)


def progress(traces: Sequence[Sequence[tuple]], phase: str, begin_ns: int, end_ns: int, slots: int) -> list[float]:
    """[slots] share of the items of `phase`, of all ranks, that are done at the end of each slot."""
    ends = sorted(event[END] for trace in traces for event in trace if event[PHASE] == phase)
    width = max(1, end_ns - begin_ns) / slots
    count, shares = 0, []
    for slot in range(slots):
        while count < len(ends) and ends[count] <= begin_ns + (slot + 1) * width:
            count += 1
        shares.append(count / len(ends) if ends else 0.0)
    return shares


def _lane_of_block(pattern: str, launch: int, starting_roles: Sequence[str]) -> list[int]:
    """Index in starting_roles by block of this launch: a launch has no block for a role that its template does not have."""
    roles = LAUNCH_ROLES[pattern][launch]
    return [index for index, role in enumerate(starting_roles) if role in roles]


def _names(starting_roles: Sequence[str]) -> list[str]:
    """Roles, numbered where several blocks start in one."""
    total, seen, names = Counter(starting_roles), Counter(), []
    for role in starting_roles:
        names.append(f"{role} {seen[role]}" if total[role] > 1 else role)
        seen[role] += 1
    return names


def _lane(rank: int, name: str, events: list[tuple], begin_ns: int, width: float, slots: int) -> Lane:
    worked: list[dict[str, float]] = [{} for _ in range(slots)]
    waited = [False] * slots
    for event in events:
        for slot, share in _spread(event[READY], event[END], begin_ns, width, slots):
            worked[slot][event[PHASE]] = worked[slot].get(event[PHASE], 0.0) + share
        for slot, _ in _spread(event[BEGIN], event[READY], begin_ns, width, slots):
            waited[slot] = True
    letters, full = [], []
    for slot in range(slots):
        letters.append(_letter(worked[slot]) or (WAITING if waited[slot] else NOTHING))
        full.append(sum(worked[slot].values()) >= 0.5)
    return Lane(rank, name, "".join(letters), full)


def _letter(worked: dict[str, float]) -> str:
    """Of the work in one slot; "" for none."""
    moved = [phase for phase in MOVING if phase in worked]
    if moved:
        return LETTERS[moved[-1]]
    return LETTERS[max(worked, key=lambda phase: worked[phase])] if worked else ""


def _spread(first_ns: int, last_ns: int, begin_ns: int, width: float, slots: int) -> list[tuple[int, float]]:
    """(slot, share of the slot) for each slot that the span touches."""
    first, last = (first_ns - begin_ns) / width, (last_ns - begin_ns) / width
    low, high = max(0, int(first)), min(slots, max(int(first) + 1, math.ceil(last)))
    return [(slot, max(0.0, min(last, slot + 1) - max(first, slot))) for slot in range(low, high)]
