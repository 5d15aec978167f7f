"""The doctor's report for a person: verdict, GPUs, pair matrix, numbers, what to do. Ten seconds to read."""

from __future__ import annotations

import os
from collections.abc import Iterable

from rich import box
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from moe_tk.cli.doctor_numbers import group_table, rate_tables
from moe_tk.topology.facts import GpuFacts, TopologySnapshot, short_uuid
from moe_tk.topology.groups import pair_kind
from moe_tk.topology.report import Report
from moe_tk.topology.verdict import PairVerdict

WIDE = 120
LEVEL_STYLE = {"good": "green", "info": "cyan", "warn": "yellow", "fail": "red"}
PROTOCOL_STYLE = {"nvlink": "green", "pcie": "cyan", "staged": "yellow", "shm": "blue"}
EXIT_WORDS = {0: ("good", "good"), 1: ("warn", "works, with warnings"), 2: ("fail", "will not work")}
_MARKS = {"pair-nvlink": "ok", "pair-pcie": "ok", "pair-peer-link-unknown": "ok", "pair-nvlink-lossy": "ok",
          "pair-unverified": "?", "pair-unknown": "?", "pair-host-faster": "slow", "pair-mismatch": "BAD",
          "pair-timeout": "HUNG", "pair-probe-failed": "ERR"}
ALL_NAMES_UP_TO = 8  # more GPUs than this: marks shrink to one character


def make_console(width: int | None = None, file=None) -> Console:
    """Colours only on a terminal (rich looks at the stream, NO_COLOR and TERM); width: the terminal's unless given."""
    return Console(width=width, file=file, highlight=False)


def show(report: Report, *, width: int | None = None, console: Console | None = None) -> None:
    console = console or make_console(width)
    if not report.snapshot.gpus and report.verdict.protocol == "shm" and not report.snapshot.host.nvidia_hardware:
        _show_cpu_only(report, console)
        return
    for part in parts(report, console.width):
        console.print(part)


def _show_cpu_only(report: Report, console: Console) -> None:
    console.print(Text(f"{report.verdict.text}; it is usable (protocol shm).", style=LEVEL_STYLE["good"]))
    if report.findings:
        console.print(_findings(report))


def parts(report: Report, width: int) -> Iterable[RenderableType]:
    wide = width >= WIDE
    yield _headline(report)
    yield _machine(report)
    if report.snapshot.gpus:
        yield _gpus(report.snapshot, wide)
    if report.verdict.pairs:
        yield _matrix(report)
    yield from rate_tables(report, wide)
    if report.groups:
        yield group_table(report, wide)
    if wide and report.snapshot.tools:
        yield _tools(report.snapshot)
    if report.findings:
        yield _findings(report)


def _headline(report: Report) -> RenderableType:
    verdict = report.verdict
    level, words = EXIT_WORDS[report.exit_code]
    first = Text.assemble((verdict.protocol, f"bold {PROTOCOL_STYLE[verdict.protocol]}"), "  ", verdict.text)
    lines = [first]
    lines.append(Text.assemble(("changes with ", "dim"), verdict.change))
    lines.append(Text.assemble(("reason id ", "dim"), verdict.reason, ("   evidence ", "dim"), _evidence(report)))
    if verdict.world > 1:
        islands = [island for island in verdict.islands if len(island) > 1]
        if islands and len(verdict.islands) > 1:
            lines.append(Text.assemble(("NVLink islands ", "dim"), "; ".join(", ".join(island) for island in islands)))
    title = Text.assemble(("moe_tk doctor", "bold"), "  ", _models(report.snapshot))
    return Panel(Group(*lines), title=title, title_align="left", subtitle=Text(words, style=LEVEL_STYLE[level]),
                 subtitle_align="right", border_style=LEVEL_STYLE[level], box=box.ROUNDED)


def _models(snapshot: TopologySnapshot) -> str:
    shown = snapshot.visible or snapshot.gpus
    counts: dict[str, int] = {}
    for gpu in shown:
        counts[gpu.name or "unknown GPU"] = counts.get(gpu.name or "unknown GPU", 0) + 1
    return " + ".join(f"{count} x {name}" for name, count in counts.items()) or "no GPU"


def _evidence(report: Report) -> str:
    if report.probes is None:
        return "the driver's word only"
    when = f"kept from {age_words(report.probe_age_s)} ago" if report.probe_age_s is not None else "fresh"
    if report.source:
        when = f"in {os.path.basename(report.source)}"
    return f"{report.probes.depth} probes, {when}"


def age_words(seconds: float) -> str:
    """ "3 minutes", in the largest unit that gives at least one."""
    for size, unit in ((86400, "day"), (3600, "hour"), (60, "minute")):
        if seconds >= size:
            count = int(seconds // size)
            return f"{count} {unit}{'s' if count != 1 else ''}"
    return f"{int(seconds)} seconds"


def _machine(report: Report) -> RenderableType:
    host = report.snapshot.host
    table = Table.grid(padding=(0, 1))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    nvml = f"NVML no ({host.nvml_state})"
    if host.nvml_state == "ok":
        nvml = f"NVML {host.nvml_library or 'library unknown'}"
    cuda = f"CUDA {known(host.cuda_version)}" if host.cuda_state == "ok" else f"CUDA no ({known(host.cuda_state)})"
    topology = "topology known" if host.nvml_state == "ok" else "topology unknown"
    table.add_row("driver", f"{known(host.driver or host.driver_module)}   {cuda}   {nvml}   {topology}")
    place = [known(host.virtual_machine) if host.virtual_machine != "" else "no VM",
             f"container {host.container}" if host.container else "no container" if host.container == "" else
             "container unknown"]
    acs = "unknown" if host.acs_redirect is None else ", ".join(host.acs_redirect) or "none"
    table.add_row("host", f"{known(host.cpu)}   {'   '.join(place)}   IOMMU {known(host.iommu)}   ACS redirect {acs}")
    chosen = {tool.what: tool for tool in report.snapshot.tools if tool.chosen}
    tools = [f"{what} {known(chosen[what].version)}" + (f" ({chosen[what].note})" if what == "torch" else "")
             for what in ("torch", "nvcc", "C++ compiler") if what in chosen]
    for what in ("ninja", "Python.h", "pybind11"):
        known_here = [tool for tool in report.snapshot.tools if tool.what == what]
        tools += [what if any(tool.path for tool in known_here) else f"{what} missing"] if known_here else []
    if tools:
        table.add_row("tools", "   ".join(tools))
    if host.visible_devices_set:
        table.add_row("visible", f"CUDA_VISIBLE_DEVICES={host.visible_devices!r}")
    return table


def known(value: object) -> str:
    return "unknown" if value is None else str(value)


def _gpus(snapshot: TopologySnapshot, wide: bool) -> RenderableType:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), header_style="bold")
    columns = ["CUDA", "NVML", "name", "arch", "SMs", "GiB", "PCIe", "NUMA"]
    columns += ["NVL", "fabric", "smem", "ECC", "PCI id"] if wide else []
    for column in (*columns, "UUID"):
        right = column in ("CUDA", "NVML", "SMs", "GiB", "NUMA", "NVL", "smem")
        table.add_column(column, justify="right" if right else "left", no_wrap=column != "name")
    for gpu in sorted(snapshot.gpus, key=lambda g: (g.cuda_index is None, g.cuda_index or 0, g.nvml_index or 0)):
        cells = [number(gpu.cuda_index, "-" if gpu.visible is False else "?"), number(gpu.nvml_index),
                 (gpu.name or "?").replace("NVIDIA ", ""), gpu.arch or "?", number(gpu.sm_count),
                 f"{gpu.memory_bytes / 2**30:.0f}" if gpu.memory_bytes else "?", _pcie(gpu), number(gpu.numa_node)]
        if wide:
            cells += [_nvlinks(gpu), gpu.fabric_state or "?",
                      f"{gpu.shared_per_block / 1024:.0f} K" if gpu.shared_per_block else "?",
                      {True: "on", False: "off", None: "?"}[gpu.ecc], gpu.pci or "?"]
        cells.append(gpu.uuid if wide else short_uuid(gpu.uuid))
        table.add_row(*cells, style="dim" if gpu.visible is False else "")
    return table


def number(value: int | None, unknown: str = "?") -> str:
    return unknown if value is None else str(value)


def _pcie(gpu: GpuFacts) -> Text:
    """Generation and width now, and after a slash the most there could be when that differs."""
    now = f"{number(gpu.pcie_gen)} x{number(gpu.pcie_width)}"
    most = f"{number(gpu.pcie_gen_max)} x{number(gpu.pcie_width_max)}"
    narrow = gpu.pcie_width and gpu.pcie_width_max and gpu.pcie_width < gpu.pcie_width_max
    return Text(now if now == most or "?" in most else f"{now} / {most}", style="yellow" if narrow else "")


def _nvlinks(gpu: GpuFacts) -> str:
    return "?" if gpu.nvlink_slots is None else f"{gpu.nvlink_up}/{gpu.nvlink_slots}" if gpu.nvlink_slots else "0"


def _matrix(report: Report) -> RenderableType:
    """Row to column: the kind of link, whether it is verified, and the measured GB/s below."""
    snapshot, verdict = report.snapshot, report.verdict
    pairs = {(pair.a, pair.b): pair for pair in verdict.pairs}
    short = len(verdict.uuids) > ALL_NAMES_UP_TO
    table = Table(title="how each pair is connected", title_justify="left", title_style="bold", box=box.SIMPLE_HEAD,
                  pad_edge=False, padding=(0, 0 if short else 1), header_style="bold")
    table.add_column("")
    for place in range(len(verdict.uuids)):
        table.add_column(_head(snapshot, verdict.uuids[place], place), justify="center", no_wrap=True)
    for row, one in enumerate(verdict.uuids):
        cells = [Text("-", style="dim") if row == column else _cell(report, pairs, one, other, short)
                 for column, other in enumerate(verdict.uuids)]
        table.add_row(Text(_head(snapshot, one, row), style="bold"), *cells)
    legend = ("NV = NVLink, PIX .. SYS = PCIe from near to far; ok = read back right, ? = not verified, no = no peer "
              "access")
    if report.probes is not None and report.probes.rates:
        legend += "; below: GB/s, one way, pushed by SMs"
    return Group(table, Text(f"{legend}\n", style="dim"))


def _head(snapshot: TopologySnapshot, uuid: str, place: int) -> str:
    label = snapshot.label(uuid)
    return label if len(label) <= 7 else f"rank {place}"


def _cell(report: Report, pairs: dict[tuple[str, str], PairVerdict], one: str, other: str, short: bool) -> Text:
    pair = pairs.get((one, other)) or pairs[other, one]
    mark = _MARKS.get(pair.reason, "no")
    if short:
        mark = {"ok": "", "no": "-"}.get(mark, mark[0])
    broken = mark in ("BAD", "HUNG", "ERR", "B", "H", "E")
    style = "red" if broken else "yellow" if mark.startswith("?") else PROTOCOL_STYLE[pair.protocol]
    kind = pair_kind(report.snapshot, one, other)
    text = Text(f"{kind}{'' if short else ' '}{mark}".strip(), style=style)
    if report.probes is not None and not short:
        best = report.probes.best_rate(one, other, load="alone", op="push")
        if best is not None:
            text.append(f"\n{best.gbs:.0f}" if best.gbs >= 100 else f"\n{best.gbs:.1f}", style="dim")
    return text


def _tools(snapshot: TopologySnapshot) -> RenderableType:
    """What builds would use and what they passed over; the files of a toolkit only if they are missing."""
    table = Table(title="tools for builds", title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False,
                  padding=(0, 1), header_style="bold")
    for column in ("used", "what", "version", "path", "note"):
        table.add_column(column, no_wrap=column != "note", overflow="ellipsis" if column == "path" else "fold")
    for tool in snapshot.tools:
        if "/" in tool.what and tool.path:
            continue
        table.add_row("yes" if tool.chosen else "no", tool.what, tool.version or "", tool.path or "", tool.note or "",
                      style="" if tool.chosen else "dim" if tool.path else "yellow")
    return table


def _findings(report: Report) -> RenderableType:
    """Numbered; under each finding the command or step that mends it."""
    table = Table.grid(padding=(0, 1))
    table.add_column(justify="right", no_wrap=True)
    table.add_column(overflow="fold")
    for place, item in enumerate(report.findings, 1):
        style = LEVEL_STYLE[item.level]
        table.add_row(Text(f"{place}", style=style), Text.assemble((item.id, f"bold {style}"), "  ", item.text))
        if item.fix and item.fix != "nothing":
            table.add_row("", Text.assemble(("do: ", "dim"), (item.fix, "cyan")))
    return Group(Text("what to do", style="bold"), table)
