"""Which N of the visible GPUs are the best group: ranked by the time that a layer's exchange takes, with the reason."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

from moe_tk.errors import ArgumentError
from moe_tk.topology.expected import LayerShape, exchange_seconds
from moe_tk.topology.facts import TopologySnapshot
from moe_tk.topology.probes import ProbeResults
from moe_tk.topology.verdict import Verdict, decide

MOST_GROUPS = 20_000


@dataclass(frozen=True, slots=True)
class GroupChoice:
    """One possible group. seconds: dispatch plus combine of one layer, None when a rate is unknown.

    protocol is the one it would get; while that waits for a probe it is the expected one, and verified is False.
    """

    uuids: tuple[str, ...]
    labels: tuple[str, ...]
    protocol: str
    verified: bool
    seconds: float | None
    origin: str
    bottleneck: str
    why: str


def rank_groups(snapshot: TopologySnapshot, probes: ProbeResults | None, size: int,
                shape: LayerShape | None = None) -> list[GroupChoice]:
    """All groups of `size` visible GPUs, the fastest exchange first. Raises ArgumentError when there are too few."""
    shape = shape or LayerShape()
    usable = decide(snapshot, probes).uuids
    if not 1 <= size <= len(usable):
        raise ArgumentError(f"--group {size}: wanted 1 to {len(usable)}, the number of visible GPUs")
    if math.comb(len(usable), size) > MOST_GROUPS:
        raise ArgumentError(f"--group {size} of {len(usable)} GPUs gives more than {MOST_GROUPS} groups: hide some "
                            f"GPUs "
                            "with CUDA_VISIBLE_DEVICES")
    choices = [_judge(snapshot, probes, group, shape) for group in itertools.combinations(usable, size)]
    return sorted(choices, key=lambda c: (c.seconds is None, c.seconds or 0.0, not c.verified))


def _judge(snapshot: TopologySnapshot, probes: ProbeResults | None, group: tuple[str, ...],
           shape: LayerShape) -> GroupChoice:
    verdict = decide(snapshot, probes, uuids=group)
    protocol = verdict.protocol if verdict.verified else verdict.expected or verdict.protocol
    seconds, origin, bottleneck = exchange_seconds(snapshot, probes, group, protocol, shape)
    return GroupChoice(group, tuple(snapshot.label(uuid) for uuid in group), protocol, verdict.verified, seconds,
                       origin, bottleneck, _why(snapshot, verdict))


def _why(snapshot: TopologySnapshot, verdict: Verdict) -> str:
    """The kinds of pairs in the group: "2 x NV4, 4 x SYS"."""
    kinds: dict[str, int] = {}
    for pair in verdict.pairs:
        kind = pair_kind(snapshot, pair.a, pair.b)
        kinds[kind] = kinds.get(kind, 0) + 1
    common_first = sorted(kinds.items(), key=lambda item: -item[1])
    return ", ".join(f"{count} x {kind}" for kind, count in common_first) or "one GPU"


def pair_kind(snapshot: TopologySnapshot, one: str, other: str) -> str:
    """As in nvidia-smi topo: NV18, PIX, ...; "PCI" when only the path is unknown, "--" when all is."""
    facts = snapshot.pair(one, other)
    if facts.nvlink:
        return f"NV{facts.nvlink_links}" if facts.nvlink_links else "NV"
    return facts.ancestor or ("PCI" if facts.nvlink is False else "--")
