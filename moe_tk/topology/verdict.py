"""Which protocol between which GPUs, and why: a pure function of a snapshot, probe results and a group.

The doctor prints what this returns and the layer obeys it. Without evidence nothing is promised: a capability that no
probe has verified counts as absent (`protocol`), and `expected` says what a probe that passes would make of it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from moe_tk.errors import TopologyError
from moe_tk.topology.expected import egress, peer_rate, staged_rate
from moe_tk.topology.facts import PairFacts, TopologySnapshot
from moe_tk.topology.probes import ProbeResults
from moe_tk.topology.reasons import REASONS, fill
from moe_tk.topology.wishes import ARGUMENT, checked_wish, chosen_protocol

_VETO = ("pair-mismatch", "pair-timeout", "pair-probe-failed")
_BLOCKED = ("pair-no-peer", "slice-no-peer", "same-gpu")
_UNVERIFIED = ("pair-unverified", "pair-unknown")


@dataclass(frozen=True, slots=True)
class PairVerdict:
    """protocol: what these two may use now. expected: what a passing probe would allow, None when nobody knows."""

    a: str
    b: str
    protocol: str
    expected: str | None
    reason: str
    text: str
    change: str
    inputs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Verdict:
    """The group's protocol. `usable` is False when a layer must not start; `verified` when no open question is left.

    uuids: the group in rank order. islands: GPUs that are all NVLink-connected among themselves, labels. natural: the
    protocol without a person's wish; forced_by: whose wish, or "".
    """

    protocol: str
    expected: str | None
    reason: str
    level: str
    text: str
    change: str
    usable: bool
    verified: bool
    world: int
    uuids: tuple[str, ...]
    pairs: tuple[PairVerdict, ...] = ()
    islands: tuple[tuple[str, ...], ...] = ()
    inputs: dict[str, Any] = field(default_factory=dict)
    natural: str = ""
    forced_by: str = ""
    multicast: bool | None = None
    multicast_why: str = ""

    def require(self) -> Verdict:
        """This verdict, or TopologyError with its text when a layer must not start."""
        if not self.usable:
            raise TopologyError(f"{self.text}. {fill(REASONS[self.reason].fix, self.inputs)}")
        return self


def decide(snapshot: TopologySnapshot, probes: ProbeResults | None = None, *, world: int | None = None,
           uuids: Sequence[str] | None = None, override: str | None = None, override_by: str = ARGUMENT,
           allow_shared: bool = False) -> Verdict:
    """The verdict for a group: `uuids` in rank order, else the first `world` visible GPUs, else all visible ones.

    override: a protocol that a person wants ("auto" and None: no wish), override_by: where they said so. allow_shared:
    ranks may share a GPU (emulation). Raises ArgumentError for an unknown protocol; everything else is a verdict.
    """
    override = checked_wish(override, override_by)
    group = tuple(uuids) if uuids is not None else _pick(snapshot, world)
    size = world if world is not None else len(group)
    pairs = tuple(judge_pair(snapshot, probes, one, other) for one, other in itertools.combinations(group, 2))
    natural = _judge_group(snapshot, probes, group, size, pairs, allow_shared)
    if override is None or natural.reason in ("two-ranks-one-gpu", "too-few-gpus") and override != "shm":
        return natural
    return _force(snapshot, natural, override, override_by)


def decide_cpu(protocol: str | None = None, *, world: int = 1) -> Verdict:
    """The verdict for a layer whose tensors are on the CPU: it needs no snapshot, since no GPU takes part.

    protocol: the layer's argument, which counts before MOE_TK_PROTOCOL. A protocol that moves data between GPUs gives a
    verdict that is not usable. Raises ArgumentError for a name that does not exist.
    """
    wish, by = chosen_protocol(protocol)
    wish = checked_wish(wish, by)
    reason = "cpu-tensors" if wish is None else "cpu-forced" if wish == "shm" else "cpu-impossible"
    inputs = {"device": "cpu", "asked": wish, "by": by, "world": world}
    spoken = REASONS[reason]
    chosen = wish or "shm"
    return Verdict(
        protocol=chosen, expected=chosen, reason=reason, level=spoken.level, text=fill(spoken.says, inputs),
        change=fill(spoken.change, inputs), usable=spoken.level != "fail", verified=True, world=world, uuids=(), inputs=inputs,
        natural="shm", forced_by=by if wish else "", multicast=False, multicast_why="the tensors are on the CPU")


def _pick(snapshot: TopologySnapshot, world: int | None) -> tuple[str, ...]:
    shown = [gpu.uuid for gpu in snapshot.visible if not (gpu.mig_enabled and not gpu.is_slice)]
    if snapshot.host.cuda_state not in (None, "ok"):
        shown = []
    return tuple(shown if world is None else shown[:world])


def judge_pair(snapshot: TopologySnapshot, probes: ProbeResults | None, one: str, other: str) -> PairVerdict:
    """The verdict about two GPUs (UUIDs)."""
    facts = snapshot.pair(one, other)
    inputs = _pair_inputs(snapshot, probes, facts)
    reason, protocol, expected = _pair_branch(inputs)
    spoken = REASONS[reason]
    return PairVerdict(one, other, protocol, expected, reason, fill(spoken.says, inputs), fill(spoken.change, inputs),
                       inputs)


def _pair_inputs(snapshot: TopologySnapshot, probes: ProbeResults | None, facts: PairFacts) -> dict[str, Any]:
    one, other = facts.a, facts.b
    known = {gpu.uuid: gpu for gpu in snapshot.gpus}
    ends = [known.get(uuid) for uuid in (one, other)]
    checks = [probes.read_back(src, dst) if probes else None for src, dst in ((one, other), (other, one))]
    bad = next((check for check in checks if check is not None and check.status != "ok"), None)
    atomics = [c for c in probes.checks if c.kind == "atomics" and {c.src, c.dst} == {one, other}] if probes else []
    lossy = next((c for c in atomics if c.status == "lost"), None)
    peer, staged = peer_rate(snapshot, probes, one, other), staged_rate(snapshot, probes, [one, other]) if all(
        ends) else None
    measured = peer.origin == "measured" and staged is not None and staged.origin == "measured"
    return {
        "pair": f"{snapshot.label(one)} - {snapshot.label(other)}", "gpu": snapshot.label(one),
        "physical_a": ends[0].physical if ends[0] else one, "physical_b": ends[1].physical if ends[1] else other,
        "slices": sum(end.is_slice for end in ends if end), "nvlink": facts.nvlink, "links": facts.nvlink_links,
        "ancestor": facts.ancestor, "claimed": facts.claimed, "cause": _peer_cause(facts),
        "forward": checks[0].status if checks[0] else None, "backward": checks[1].status if checks[1] else None,
        "detail": bad.detail if bad else "", "limit": probes.limit_s if probes else None,
        "lossy": lossy is not None, "sent": lossy.sent if lossy else None,
        "lost": (lossy.sent or 0) - (lossy.counted or 0) if lossy else 0,
        "peer_gbs": peer.gbs if measured else None, "staged_gbs": staged.gbs if measured and staged else None,
        "expected": "nvlink" if facts.nvlink else "pcie",
    }


def _peer_cause(facts: PairFacts) -> str:
    if facts.peer_access is False or facts.peer_access_back is False:
        nvml = next((s for s in (facts.p2p_read, facts.p2p_write) if s not in (None, "ok")), None)
        return f"CUDA says no; NVML: {nvml}" if nvml else "CUDA says no"
    bad = next((f"{what} {status}" for what, status in (("read", facts.p2p_read), ("write", facts.p2p_write))
                if status not in (None, "ok")), None)
    return bad or "unknown cause"


def _pair_branch(i: dict[str, Any]) -> tuple[str, str, str | None]:
    """(reason id, protocol, expected protocol). The first that applies; data count before claims."""
    both = (i["forward"], i["backward"])
    if i["physical_a"] == i["physical_b"]:
        return "same-gpu", "staged", "staged"
    if i["slices"]:
        return "slice-no-peer", "staged", "staged"
    for status, reason in (("mismatch", "pair-mismatch"), ("timeout", "pair-timeout"), ("error", "pair-probe-failed")):
        if status in both:
            return reason, "staged", "staged"
    if "refused" in both or i["claimed"] is False and both != ("ok", "ok"):
        return "pair-no-peer", "staged", "staged"
    if both != ("ok", "ok"):
        if i["claimed"] is True:
            return "pair-unverified", "staged", i["expected"]
        return "pair-unknown", "staged", None
    if i["peer_gbs"] is not None and i["staged_gbs"] is not None and i["peer_gbs"] < i["staged_gbs"]:
        return "pair-host-faster", "staged", "staged"
    if i["nvlink"] is None:
        return "pair-peer-link-unknown", "pcie", "pcie"
    if not i["nvlink"]:
        return "pair-pcie", "pcie", "pcie"
    return ("pair-nvlink-lossy", "pcie", "pcie") if i["lossy"] else ("pair-nvlink", "nvlink", "nvlink")


def _judge_group(snapshot: TopologySnapshot, probes: ProbeResults | None, group: tuple[str, ...], world: int,
                 pairs: tuple[PairVerdict, ...], allow_shared: bool) -> Verdict:
    inputs = _group_inputs(snapshot, probes, group, world, pairs)
    reason, protocol, expected = _group_branch(inputs, allow_shared)
    return _verdict(snapshot, reason, protocol, expected, inputs, group, world, pairs)


def _group_inputs(snapshot: TopologySnapshot, probes: ProbeResults | None, group: tuple[str, ...], world: int,
                  pairs: tuple[PairVerdict, ...]) -> dict[str, Any]:
    known = {gpu.uuid: gpu for gpu in snapshot.gpus}
    physical = [known[uuid].physical if uuid in known else uuid for uuid in group]
    shared = next((p for p in physical if physical.count(p) > 1), None)
    empty = any(problem.id == "visible-empty" for problem in snapshot.problems)

    def named(*reasons: str) -> list[str]:
        return [str(pair.inputs["pair"]) for pair in pairs if pair.reason in reasons]

    rates = [egress(snapshot, probes, uuid, group) for uuid in group] if len(group) > 1 and all(
        uuid in known for uuid in group) else []
    staged = staged_rate(snapshot, probes, group) if rates else None
    measured = bool(rates) and all(r.origin == "measured" for r in rates) and staged and staged.origin == "measured"
    islands = nvlink_islands(snapshot, group)
    return {
        "gpus": len(group), "world": world, "visible": len(_pick(snapshot, None)) if world > len(group) else len(group),
        "hardware": bool(snapshot.host.nvidia_hardware or snapshot.gpus),
        "hidden": empty, "value": snapshot.host.visible_devices if empty else None, "cause": _no_cuda_cause(snapshot),
        "gpu": snapshot.label(group[0]) if group else "", "uuids": list(group), "physical": physical,
        "ranks": [rank for rank, p in enumerate(physical) if p == shared], "pairs": len(pairs),
        "slices": sum(known[uuid].is_slice for uuid in group if uuid in known),
        "nvlink_pairs": sum(pair.protocol == "nvlink" for pair in pairs),
        "pcie_pairs": sum(pair.protocol == "pcie" for pair in pairs),
        "other_pairs": sum(pair.protocol != "nvlink" for pair in pairs),
        "staged_pairs": sum(pair.protocol == "staged" for pair in pairs),
        "unverified_pairs": sum(pair.reason in _UNVERIFIED for pair in pairs),
        "vetoed": named(*_VETO), "blocked": named(*_BLOCKED),
        "slow": named("pair-host-faster"), "expected": _expected(pairs),
        "islands": ["{" + ", ".join(island) + "}" for island in islands],
        "peer_gbs": min(r.gbs for r in rates if r.gbs is not None) if measured else None,
        "staged_gbs": staged.gbs if measured and staged else None,
    }


def _expected(pairs: tuple[PairVerdict, ...]) -> str | None:
    """What the group would get if every unverified pair passed its probe; None when some pair is a riddle."""
    hoped = [pair.expected for pair in pairs]
    if None in hoped or not hoped:
        return None
    return next((p for p in ("staged", "pcie") if p in hoped), "nvlink")


def _no_cuda_cause(snapshot: TopologySnapshot) -> str:
    for problem in snapshot.problems:
        if problem.id.startswith(("cuda-", "visible-bad")):
            return problem.id
    return snapshot.host.cuda_error or snapshot.host.cuda_state or "unknown"


def _group_branch(i: dict[str, Any], allow_shared: bool) -> tuple[str, str, str | None]:
    if i["gpus"] == 0:
        if i["hidden"]:
            return "gpus-hidden", "shm", "shm"
        return ("gpus-unusable" if i["hardware"] else "no-gpu"), "shm", "shm"
    if len(i["ranks"]) > 1 and not allow_shared:
        return "two-ranks-one-gpu", "staged", None
    if i["world"] > i["gpus"]:
        return "too-few-gpus", "shm", None
    if len(i["ranks"]) == i["world"] > 1 and not i["slices"]:
        return "shared-gpu", "pcie", "pcie"
    if i["world"] == 1:
        return "one-gpu", "pcie", "pcie"
    if i["pairs"] == i["nvlink_pairs"]:
        return "all-nvlink", "nvlink", "nvlink"
    if i["vetoed"]:
        return "some-pair-vetoed", "staged", "staged"
    if i["blocked"]:
        return "some-pair-no-peer", "staged", "staged"
    if i["unverified_pairs"]:
        return "unverified", "staged", i["expected"]
    if i["slow"]:
        return "some-pair-slower", "staged", "staged"
    if i["peer_gbs"] is not None and i["staged_gbs"] is not None and i["peer_gbs"] < i["staged_gbs"]:
        return "host-faster", "staged", "staged"
    if i["nvlink_pairs"]:
        return "nvlink-islands", "pcie", "pcie"
    return "all-peer", "pcie", "pcie"


def _verdict(snapshot: TopologySnapshot, reason: str, protocol: str, expected: str | None, inputs: dict[str, Any],
             group: tuple[str, ...], world: int, pairs: tuple[PairVerdict, ...], natural: str = "",
             forced_by: str = "") -> Verdict:
    spoken = REASONS[reason]
    multicast, why = _multicast(snapshot, group, protocol)
    return Verdict(
        protocol=protocol, expected=expected, reason=reason, level=spoken.level, text=fill(spoken.says, inputs),
        change=fill(spoken.change, inputs), usable=spoken.level != "fail",
        verified=not any(pair.reason in _UNVERIFIED for pair in pairs), world=world, uuids=group, pairs=pairs,
        islands=tuple(tuple(island) for island in nvlink_islands(snapshot, group)), inputs=inputs,
        natural=natural or protocol, forced_by=forced_by, multicast=multicast, multicast_why=why)


def _force(snapshot: TopologySnapshot, natural: Verdict, asked: str, by: str) -> Verdict:
    """A person's wish over the natural verdict, and what speaks against it."""
    conflict, impossible = _conflict(natural, asked)
    inputs = {**natural.inputs, "protocol": asked, "asked": asked, "by": by, "natural": natural.protocol,
              "natural_reason": natural.reason, "conflict": conflict, "impossible": impossible}
    reason = "forced-impossible" if impossible else "forced-against-evidence" if conflict else "forced"
    return _verdict(snapshot, reason, asked, asked, inputs, natural.uuids, natural.world, natural.pairs,
                    natural.protocol, by)


def _conflict(natural: Verdict, asked: str) -> tuple[str, bool]:
    """(what speaks against it or "", whether it cannot work at all)."""
    if asked == "shm":
        return "", False
    if not natural.uuids:
        return "no GPU can be used", True
    if asked == "staged" or natural.world == 1:
        return "", False
    blocked = [str(p.inputs["pair"]) for p in natural.pairs if p.reason in _BLOCKED]
    if blocked:
        return f"there is no peer access for {', '.join(blocked)}", True
    vetoed = [str(p.inputs["pair"]) for p in natural.pairs if p.reason in _VETO]
    if vetoed:
        return f"a probe found direct access broken for {', '.join(vetoed)}", False
    if natural.inputs["unverified_pairs"]:
        return "nothing was verified yet", False
    if asked == "nvlink" and natural.inputs["nvlink_pairs"] < natural.inputs["pairs"]:
        others = [str(p.inputs["pair"]) for p in natural.pairs if p.protocol != "nvlink"]
        return f"remote atomics may lose increments without NVLink ({', '.join(others)})", False
    return "", False


def nvlink_islands(snapshot: TopologySnapshot, group: Sequence[str]) -> list[list[str]]:
    """The group cut into sets in which every two GPUs have NVLink, as labels; GPUs without any stand alone."""
    left, islands = list(dict.fromkeys(group)), []
    while left:
        island = [left.pop(0)]
        for uuid in list(left):
            if all(snapshot.pair(uuid, member).nvlink for member in island):
                island.append(uuid)
                left.remove(uuid)
        islands.append([snapshot.label(uuid) for uuid in island])
    return islands


def _multicast(snapshot: TopologySnapshot, group: tuple[str, ...], protocol: str) -> tuple[bool | None, str]:
    """Whether multicast variants may be used. It gates nothing else: plain peer access does not need it."""
    if protocol != "nvlink":
        return False, f"multicast needs NVLink; the protocol is {protocol}"
    known = [gpu.multicast for gpu in snapshot.gpus if gpu.uuid in group]
    if False in known:
        return False, "a GPU of the group does not support it; peer access is not affected"
    if None in known or not known:
        return None, "nobody could say whether the GPUs support it"
    return True, "every GPU of the group supports it"
