"""How fast pairs and groups move data: measured where probes ran, else derived from the link, and always said which.

Rates are GB/s = 1e9 bytes/s in one direction while the other direction is busy too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from moe_tk.topology.facts import GpuFacts, PairFacts, TopologySnapshot
from moe_tk.topology.probes import HOST, ProbeResults

NVLINK_GBS_PER_LINK = {1: 20.0, 2: 25.0, 3: 25.0, 4: 25.0, 5: 50.0}  # nominal, each way
NVLINK_GBS_OF_ARCH = {"sm_86": 14.0625}  # bridges of workstation and GeForce cards: four links, 56.25 each way
PCIE_GBS_PER_LANE = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}  # after line coding
# Reached by real copies on two machines: 364 of 450 GB/s (H200, 18 links), 50.9 of 63 GB/s (PCIe 5.0 x16 push), and
# 33 of 63 GB/s each way through pinned host memory while all four streams of two GPUs run.
NVLINK_EFFICIENCY, PCIE_EFFICIENCY, STAGED_EFFICIENCY = 0.81, 0.81, 0.52
SYS_FACTOR = 0.5  # assumed, not measured: a path over the socket interconnect halves the rate


@dataclass(frozen=True, slots=True)
class Estimate:
    """A bandwidth or None. origin: "measured", "expected" (derived from the link), "assumed" or "unknown"."""

    gbs: float | None
    origin: str
    basis: str = ""


UNKNOWN_RATE = Estimate(None, "unknown")


@dataclass(frozen=True, slots=True)
class LayerShape:
    """The layer whose exchange is timed: T tokens per rank, H wide, E experts, k of them per token, bytes per value."""

    name: str = "seed"
    tokens: int = 2048
    hidden: int = 4096
    intermediate: int = 3072
    experts: int = 64
    top_k: int = 8
    bytes_per_value: int = 2

    def bytes_to_each_peer(self, world: int) -> float:
        """Bytes that a rank sends to one other in dispatch plus combine, uniform routing, each token once per rank."""
        away = self.experts - self.experts / world
        miss = 1.0
        for i in range(self.top_k):  # no expert of that rank among k distinct ones
            miss *= max(0.0, away - i) / (self.experts - i)
        return 2 * self.tokens * (1 - miss) * self.hidden * self.bytes_per_value

    def flops_per_rank(self) -> float:
        return 2.0 * self.tokens * self.top_k * self.hidden * self.intermediate * 3


def pcie_gbs(gpu: GpuFacts) -> float | None:
    """Rate of the GPU's own link. The generation drops at idle, so the highest one counts; the width does not."""
    lane = PCIE_GBS_PER_LANE.get(gpu.pcie_gen_max or gpu.pcie_gen or 0)
    width = gpu.pcie_width or gpu.pcie_width_max
    return lane * width * PCIE_EFFICIENCY if lane and width else None


def peer_rate(snapshot: TopologySnapshot, probes: ProbeResults | None, one: str, other: str) -> Estimate:
    """Direct rate of a pair, the slower of its two directions. Push counts where it was measured."""
    if probes is not None:
        found = []
        for src, dst in ((one, other), (other, one)):
            for load in ("both-ways", "alone"):
                best = probes.best_rate(src, dst, load=load, op="push") or probes.best_rate(src, dst, load=load,
                                                                                           op="pull")
                if best:
                    found.append(best.gbs)
                    break
        if len(found) == 2:
            return Estimate(min(found), "measured")
    return link_rate(snapshot, snapshot.pair(one, other))


def link_rate(snapshot: TopologySnapshot, pair: PairFacts) -> Estimate:
    try:
        ends = snapshot.gpu(pair.a), snapshot.gpu(pair.b)
    except KeyError:
        return UNKNOWN_RATE
    if pair.nvlink and pair.nvlink_links:
        each = NVLINK_GBS_OF_ARCH.get(ends[0].arch or "") or NVLINK_GBS_PER_LINK.get(ends[0].nvlink_version or 0)
        if each:
            return Estimate(each * pair.nvlink_links * NVLINK_EFFICIENCY, "expected", f"{pair.nvlink_links} NVLinks")
        return UNKNOWN_RATE
    if pair.nvlink:
        return UNKNOWN_RATE
    rates = [pcie_gbs(end) for end in ends]
    if None in rates:
        return UNKNOWN_RATE
    slower = min(rate for rate in rates if rate is not None)
    if pair.ancestor == "SYS":
        return Estimate(slower * SYS_FACTOR, "assumed", "PCIe across sockets")
    return Estimate(slower, "expected", f"PCIe {pair.ancestor or 'path unknown'}")


def staged_rate(snapshot: TopologySnapshot, probes: ProbeResults | None, uuids: Sequence[str]) -> Estimate:
    """Rate of each GPU through pinned host memory while all of `uuids` do the same: the slowest of them."""
    measured = [_measured_staged(probes, uuid, len(uuids) > 1) for uuid in uuids] if probes else []
    if measured and None not in measured:
        return Estimate(min(rate for rate in measured if rate is not None), "measured", "pinned host memory, duplex")
    rates = []
    for uuid in uuids:
        rate = pcie_gbs(snapshot.gpu(uuid))
        if rate is None:
            return UNKNOWN_RATE
        rates.append(rate / PCIE_EFFICIENCY * STAGED_EFFICIENCY)
    return Estimate(min(rates), "expected", "pinned host memory, duplex") if rates else UNKNOWN_RATE


def _measured_staged(probes: ProbeResults, uuid: str, together: bool) -> float | None:
    for load in ("all", "duplex", "alone") if together else ("duplex", "alone"):
        ways = [probes.best_rate(uuid, HOST, load=load, op=op) for op in ("push", "pull")]
        if ways[0] and ways[1]:
            return min(ways[0].gbs, ways[1].gbs)
    return None


def egress(snapshot: TopologySnapshot, probes: ProbeResults | None, uuid: str, group: Sequence[str]) -> Estimate:
    """Total rate at which one GPU writes to all others of its group while all do so, where that was measured."""
    if probes is not None and set(probes.uuids) == set(group):
        best = probes.best_rate(uuid, "all", load="all", op="push")
        if best:
            return Estimate(best.gbs, "measured", "all to all")
    return UNKNOWN_RATE


@dataclass(frozen=True, slots=True)
class _Wire:
    """Something that several transfers of one GPU share: how many bytes it carries, how fast, what it is."""

    load: float
    rate: Estimate
    name: str


def _wires(snapshot: TopologySnapshot, probes: ProbeResults | None, uuid: str, group: Sequence[str],
           each: float) -> list[_Wire]:
    """What one GPU's exchange goes over: every pair by itself, and the links that several pairs share.

    Bridged NVLinks belong to one pair; an NVSwitch port, the PCIe link and the path to the other socket are shared.
    """
    label = snapshot.label(uuid)
    wires, shared = [], {}
    for other in group:
        if other == uuid:
            continue
        rate, facts = peer_rate(snapshot, probes, uuid, other), snapshot.pair(uuid, other)
        name = f"{label} - {snapshot.label(other)}"
        wires.append(_Wire(each, rate, f"{name}: {rate.basis}" if rate.basis else name))
        kinds = ([] if facts.nvlink_via == "direct" else ["NVSwitch port"]) if facts.nvlink else ["PCIe link"]
        if facts.ancestor == "SYS" and not facts.nvlink:
            kinds.insert(0, "path to the other socket")
        for kind in kinds:
            shared.setdefault(kind, []).append(rate)
    for kind, rates in shared.items():
        known = [rate for rate in rates if rate.gbs is not None]
        if known:
            best = max(known, key=lambda rate: rate.gbs or 0.0)
            wires.append(_Wire(each * len(rates), best, f"{label}: its {kind}"))
    total = egress(snapshot, probes, uuid, group)
    return [_Wire(each * (len(group) - 1), total, f"{label}: {total.basis}")] if total.gbs else wires


def exchange_seconds(snapshot: TopologySnapshot, probes: ProbeResults | None, group: Sequence[str], protocol: str,
                     shape: LayerShape) -> tuple[float | None, str, str]:
    """(seconds, origin, bottleneck) of dispatch plus combine of one layer over `group` with `protocol`.

    The slowest wire of the slowest GPU decides; the origin is the weakest that the number rests on.
    """
    world = len(group)
    if world < 2:
        return 0.0, "measured", "one GPU: nothing to move"
    each = shape.bytes_to_each_peer(world) / 1e9
    if protocol == "staged":
        rate = staged_rate(snapshot, probes, group)
        if rate.gbs is None:
            return None, "unknown", "host memory rate unknown"
        return each * (world - 1) / rate.gbs, rate.origin, "pinned host memory"
    worst, origin, bottleneck = 0.0, "measured", ""
    for uuid in group:
        for wire in _wires(snapshot, probes, uuid, group, each):
            if wire.rate.gbs is None:
                return None, "unknown", f"rate unknown: {wire.name}"
            if wire.load / wire.rate.gbs > worst:
                worst, origin, bottleneck = wire.load / wire.rate.gbs, wire.rate.origin, wire.name
    return worst, origin, bottleneck


def gemm_tflops(probes: ProbeResults | None, uuid: str) -> float | None:
    """Rate of the dense GEMM of the interference probe when no SM is taken from it."""
    for record in probes.interference if probes else ():
        if record.gpu == uuid and record.sms == 0:
            try:
                m, n, k = (int(part) for part in record.shape.split("x"))
            except ValueError:
                return None
            return 2.0 * m * n * k / record.gemm_us / 1e6
    return None


def ceiling(comm_s: float | None, comp_s: float | None) -> float | None:
    """The most that perfect overlap gains over one after the other: (comm + comp) / max(comm, comp)."""
    if not comm_s or not comp_s or not math.isfinite(comm_s + comp_s):
        return None
    return (comm_s + comp_s) / max(comm_s, comp_s)
