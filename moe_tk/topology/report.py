"""One report: facts, probes, verdict, findings, groups; versioned JSON; what `moe_tk doctor` prints and ranks share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from moe_tk.errors import TopologyError
from moe_tk.topology.codec import to_plain
from moe_tk.topology.expected import LayerShape, ceiling, exchange_seconds, gemm_tflops
from moe_tk.topology.facts import SNAPSHOT_SCHEMA, TopologySnapshot, snapshot_from_json, snapshot_to_json
from moe_tk.topology.findings import Finding, exit_code, find
from moe_tk.topology.groups import GroupChoice, rank_groups
from moe_tk.topology.probes import ProbeResults, probes_from_json, probes_to_json
from moe_tk.topology.verdict import Verdict, decide

REPORT_SCHEMA = "moe_tk.doctor/1"


@dataclass(frozen=True, slots=True)
class Exchange:
    """Time of dispatch plus combine of one layer by one protocol, and the most that hiding it could gain."""

    protocol: str
    seconds: float | None
    origin: str
    bottleneck: str
    ceiling: float | None  # (communication + computation) / max of both; None without a measured GEMM rate


@dataclass(frozen=True, slots=True)
class Report:
    """Everything the doctor has to say. probe_age_s: age of probes taken from the cache, None when fresh or absent."""

    snapshot: TopologySnapshot
    probes: ProbeResults | None
    verdict: Verdict
    findings: tuple[Finding, ...]
    exchanges: tuple[Exchange, ...] = ()
    groups: tuple[GroupChoice, ...] = ()
    shape: LayerShape = LayerShape()
    probe_age_s: float | None = None
    probe_path: str | None = None
    source: str = ""  # file it was read from, "" for this machine
    seconds: float | None = None

    @property
    def exit_code(self) -> int:
        return exit_code(self.verdict, self.findings)

    @property
    def protocol(self) -> str:
        """The protocol that a layer of this group uses."""
        return self.verdict.protocol


def make_report(snapshot: TopologySnapshot, probes: ProbeResults | None = None, *, world: int | None = None,
                uuids: Sequence[str] | None = None, override: str | None = None,
                override_by: str = "the argument protocol", group_size: int | None = None, allow_shared: bool = False,
                extra: Sequence[Finding] = (), shape: LayerShape | None = None, **origin: Any) -> Report:
    """Judge facts and probes. Pure: the same input gives the same report. `origin` holds probe_age_s, source, ...

    Raises ArgumentError for an unknown protocol or an impossible group size.
    """
    shape = shape or LayerShape()
    verdict = decide(snapshot, probes, world=world, uuids=uuids, override=override, override_by=override_by,
                     allow_shared=allow_shared)
    findings = [*extra, *find(snapshot, probes, verdict)]
    order = {"fail": 0, "warn": 1, "info": 2}
    groups = tuple(rank_groups(snapshot, probes, group_size, shape)) if group_size is not None else ()
    return Report(snapshot, probes, verdict, tuple(sorted(findings, key=lambda f: order[f.level])),
                  _exchanges(snapshot, probes, verdict, shape), groups, shape, **origin)


def _exchanges(snapshot: TopologySnapshot, probes: ProbeResults | None, verdict: Verdict,
               shape: LayerShape) -> tuple[Exchange, ...]:
    """The chosen (or expected) protocol first, then through host memory: the numbers that the choice rests on."""
    if verdict.world < 2 or not verdict.usable or len(set(verdict.uuids)) < 2 or verdict.protocol == "shm":
        return ()
    rates = [gemm_tflops(probes, uuid) for uuid in verdict.uuids]
    known = [rate for rate in rates if rate]
    compute = shape.flops_per_rank() / (min(known) * 1e12) if known and len(known) == len(rates) else None
    direct = verdict.protocol if verdict.protocol in ("nvlink", "pcie") else verdict.expected
    if verdict.reason in ("host-faster", "some-pair-slower"):
        direct = "pcie"
    found = []
    for protocol in dict.fromkeys(filter(None, (direct, "staged"))):
        seconds, origin, bottleneck = exchange_seconds(snapshot, probes, verdict.uuids, protocol, shape)
        found.append(Exchange(protocol, seconds, origin, bottleneck, ceiling(seconds, compute)))
    return tuple(found)


def report_to_json(report: Report) -> dict[str, Any]:
    """Plain data; "unknown" for what nobody could read."""
    return {
        "schema": REPORT_SCHEMA,
        "protocol": report.verdict.protocol,
        "reason": report.verdict.reason,
        "exit_code": report.exit_code,
        "verdict": to_plain(report.verdict),
        "findings": to_plain(report.findings),
        "exchanges": to_plain(report.exchanges),
        "groups": to_plain(report.groups),
        "shape": to_plain(report.shape),
        "probe_age_s": to_plain(report.probe_age_s),
        "source": report.source,
        "seconds": to_plain(report.seconds),
        "snapshot": snapshot_to_json(report.snapshot),
        "probes": probes_to_json(report.probes) if report.probes is not None else None,
    }


def facts_from_json(data: Any) -> tuple[TopologySnapshot, ProbeResults | None]:
    """Snapshot and probes from a saved report, or from a bare snapshot. Raises TopologyError."""
    schema = data.get("schema") if isinstance(data, dict) else None
    if schema == SNAPSHOT_SCHEMA:
        return snapshot_from_json(data), None
    if schema != REPORT_SCHEMA:
        raise TopologyError(f"neither a report ({REPORT_SCHEMA}) nor a snapshot ({SNAPSHOT_SCHEMA}): its schema is "
                            f"{schema!r}. Make one with: moe_tk doctor --save FILE")
    probes = data.get("probes")
    return snapshot_from_json(data.get("snapshot")), probes_from_json(probes) if probes else None
