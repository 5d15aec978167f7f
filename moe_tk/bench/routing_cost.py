"""What a routing costs: (us / floor) of a line over (us / floor) of the balanced line beside it, for each pattern of ours.

Floors are counted from the actual routing, on the rank that has most, so that this compares at equal work: a skewed routing may
well take longer because a rank has more to do, and that alone costs nothing here. Where the two floors are bounded by different
things (weights here, FLOPs there) the ratio also has in it how close the layer comes to either bound, so both are named.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from moe_tk.bench.run import time_of

EVEN = "balanced"


def with_routing_costs(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The lines, with `routing_cost` in those that have a balanced line of the same shape, mode, dtype and T."""
    even = {_place(line): line for line in lines if line["routing"] == EVEN}
    found = []
    for line in lines:
        cost = _cost(line, even[_place(line)]) if line["routing"] != EVEN and _place(line) in even else None
        found.append({**line, "routing_cost": cost} if cost else line)
    return found


def _place(line: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(line[name] for name in ("shape", "mode", "dtype", "tokens", "world"))


def _cost(line: dict[str, Any], even: dict[str, Any]) -> dict[str, Any] | None:
    """None where no pattern of ours has times in both."""
    mine, theirs = _to_floor(line), _to_floor(even)
    patterns = {name: round(mine[name] / theirs[name], 4) for name in mine if name in theirs}
    if not patterns:
        return None
    return {"patterns": patterns, "bound": line["floor"]["bound"], "balanced_bound": even["floor"]["bound"],
            "balanced_floor_us": even["floor"]["us"]}


def _to_floor(line: dict[str, Any]) -> dict[str, float]:
    """us / floor of each pattern of ours that was timed."""
    floor = line["floor"]["us"] if "floor" in line else 0.0
    times = {contender["name"]: time_of(contender) for contender in line["contenders"] if contender["ours"]}
    return {name: us / floor for name, us in times.items() if us and floor}
