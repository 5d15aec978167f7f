"""Tables of measured numbers for the doctor's report: bandwidth, latency, host path, interference, groups."""

from __future__ import annotations

from collections.abc import Iterable

from rich import box
from rich.console import RenderableType
from rich.table import Table

from moe_tk.topology.probes import HOST, ProbeResults, Rate
from moe_tk.topology.report import Report

ENOUGH = 0.9  # share of the best rate at which more SMs count as not worth it
GROUPS_SHOWN = 8
CREDIBLE, UNUSABLE = 0.95, "?"  # a GEMM that parked SMs slow down more than moving ones do: no reference


def rate_tables(report: Report, wide: bool) -> Iterable[RenderableType]:
    if report.exchanges:
        yield _exchange_table(report)
    if report.probes is None or not report.probes.rates:
        return
    yield _pair_table(report, report.probes)
    if host := _host_table(report, report.probes):
        yield host
    if report.probes.interference:
        yield _interference_table(report, report.probes)


WORDS = ("from", "pairs", "held up by", "protocol", "op")  # columns of text, not of numbers


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False,
                  padding=(0, 1), header_style="bold")
    for place, column in enumerate(columns):
        table.add_column(column, justify="left" if place == 0 or column in WORDS else "right", no_wrap=place == 0)
    return table


def milliseconds(seconds: float | None) -> str:
    return "unknown" if seconds is None else f"{seconds * 1e3:.3g} ms"


def _exchange_table(report: Report) -> Table:
    shape = report.shape
    table = _table(f"exchange of one layer ({shape.name}: T {shape.tokens}, H {shape.hidden}, E {shape.experts}, "
                   f"k {shape.top_k}, bf16)", "protocol", "time", "from", "held up by", "gain if hidden")
    for item in report.exchanges:
        gain = f"at most {item.ceiling:.2f}x" if item.ceiling else "unknown"
        table.add_row(item.protocol, milliseconds(item.seconds), item.origin, item.bottleneck, gain)
    return table


def enough_sms(probes: ProbeResults, best: Rate) -> int:
    """The fewest SMs that reach ENOUGH of the best rate of the same kind, by either engine."""
    same = [r for r in probes.rates if (r.src, r.dst, r.op, r.load, r.payload) ==
            (best.src, best.dst, best.op, best.load, best.payload) and r.sms > 0 and r.gbs >= ENOUGH * best.gbs]
    return min((r.sms for r in same), default=best.sms)


def _rate_cell(probes: ProbeResults, src: str, dst: str, op: str, load: str) -> str:
    sm_driven = [r for r in probes.rates if (r.src, r.dst, r.op, r.load, r.payload) == (src, dst, op, load, "copy")
                 and r.sms > 0]
    best = max(sm_driven, key=lambda r: r.gbs, default=None)
    return f"{best.gbs:.1f} ({enough_sms(probes, best)})" if best else "-"


def _engine_cell(probes: ProbeResults, src: str, dst: str, op: str, load: str) -> str:
    best = probes.best_rate(src, dst, op=op, load=load, engine="copy-engine")
    return f"{best.gbs:.1f}" if best else "-"


def _pair_table(report: Report, probes: ProbeResults) -> Table:
    table = _table("GB/s between GPUs (SMs needed for 90 % of it)", "pair", "push", "push both", "pull", "pull both",
                   "engine", "flag us")
    shown = [(pair.a, pair.b) for pair in report.verdict.pairs]
    for one, other in shown:
        if not any((r.src, r.dst) == (one, other) for r in probes.rates):
            continue
        latency = probes.latency_us(one, other)
        table.add_row(f"{report.snapshot.label(one)} - {report.snapshot.label(other)}",
                      *(_rate_cell(probes, one, other, op, load) for op in ("push", "pull")
                        for load in ("alone", "both-ways")),
                      _engine_cell(probes, one, other, "push", "alone"), f"{latency:.2f}" if latency else "-")
    if len(report.verdict.uuids) > 2:
        for uuid in report.verdict.uuids:
            table.add_row(f"{report.snapshot.label(uuid)} - all", _rate_cell(probes, uuid, "all", "push", "all"), "",
                          _rate_cell(probes, uuid, "all", "pull", "all"), "", "", "")
    return table


def _host_table(report: Report, probes: ProbeResults) -> Table | None:
    table = _table("GB/s to and from pinned host memory (SMs needed for 90 % of it)", "GPU", "to host", "from host",
                   "both: to", "both: from", "all: to", "all: from", "engine to", "engine from")
    rows = 0
    for uuid in report.verdict.uuids:
        if not any((r.src, r.dst) == (uuid, HOST) for r in probes.rates):
            continue
        cells = [_rate_cell(probes, uuid, HOST, op, load) for load in ("alone", "duplex", "all")
                 for op in ("push", "pull")]
        table.add_row(report.snapshot.label(uuid), *cells, _engine_cell(probes, uuid, HOST, "push", "alone"),
                      _engine_cell(probes, uuid, HOST, "pull", "alone"))
        rows += 1
    return table if rows else None


def _interference_table(report: Report, probes: ProbeResults) -> Table:
    """Worst GPU per line: how much slower a GEMM runs beside SMs that move data than beside SMs that do nothing."""
    shape = probes.interference[0].shape
    table = _table(f"bf16 GEMM {shape} beside moving SMs", "SMs", "op", "GEMM us", "beside parked", "slower",
                   "GB/s moved")
    keys = dict.fromkeys((record.sms, record.op) for record in probes.interference)
    for sms, op in keys:
        same = [record for record in probes.interference if (record.sms, record.op) == (sms, op)]
        worst = max(same, key=lambda record: record.slowdown)
        slower = "-" if not sms else UNUSABLE if worst.slowdown < CREDIBLE else f"{(worst.slowdown - 1) * 100:+.1f} %"
        table.add_row(str(sms), op, f"{worst.gemm_us:.0f}", f"{worst.parked_us:.0f}" if sms else "-", slower,
                      f"{worst.traffic_gbs:.1f}" if sms else "-")
    return table


def group_table(report: Report, wide: bool) -> Table:
    best = report.groups[0]
    table = _table(f"groups of {len(best.uuids)}, best first ({len(report.groups)} possible)", "GPUs", "protocol",
                   "time", "from", "pairs", "held up by")
    for choice in report.groups[:GROUPS_SHOWN]:
        names = ", ".join(label.removeprefix("GPU ") for label in choice.labels)
        protocol = choice.protocol + ("" if choice.verified else " ?")
        table.add_row(names, protocol, milliseconds(choice.seconds), choice.origin, choice.why, choice.bottleneck)
    return table
