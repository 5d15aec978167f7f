"""The table of a traced call."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.text import Text

from moe_tk.demo.layout import percent, section, simple_table
from moe_tk.demo.report import ReportConsole

OPEN_EXPLAINED = ("us of each phase on the blocks that build (one, with few tokens): mean, longest, and when the last block was "
                  "done. Rows of other ranks: how long the block that sent last waited for them when it had sent")
GEMM_EXPLAINED = ("us since the first block began. Shares are of the kernel's span over all loaders and consumer warpgroups; the "
                  "tail is from the first consumer's last tile to the last one's")


def show(summary: dict[str, Any], console: Console | None = None) -> None:
    """Prints summarise()'s tables."""
    console = console or ReportConsole()
    title = (f"{summary['shape']}, {summary['mode'].upper()}, {summary['tokens_per_rank']} tokens on each of "
             f"{summary['world']} ranks")
    section(console, title,
            f"The traced call took {summary['span_us']:.1f} us from its first block to its last lap on any "
            f"rank; traced calls take {summary['traced_call_us']:.1f} us.")
    for rank in summary["ranks"]:
        _show_rank(console, rank)


def _show_rank(console: Console, rank: dict[str, Any]) -> None:
    text = f"rank {rank['rank']}: {rank['laps']} laps"
    if rank["lost"]:
        text += f", {rank['lost']} more found no room"
    if rank["clock"]:
        text += f"; the timer ticks every {rank['clock']['timer_period_ns']:g} ns"
    if rank["offset_error_ns"]:
        text += f"; aligned with rank 0 within {rank['offset_error_ns']:.0f} ns"
    console.print(Text(text, style="bold"))
    kernels = rank["kernels"]
    if "open_call" in kernels:
        _show_open(console, kernels["open_call"])
    if rank["clock"]:
        _show_gemms(console, {name: kernels[name] for name in ("gather_gemm", "gemm_scatter") if name in kernels})
        _show_jobs(console, kernels.get("gemm_scatter", {}))
    else:
        _show_plain(console, kernels)


def _show_open(console: Console, kernel: dict[str, Any]) -> None:
    table = simple_table("open_call", "mean", "longest", "done at")
    for name, phase in kernel["phases"].items():
        table.add_row(name, f"{phase['mean_us']:.1f}", f"{phase['most_us']:.1f}", f"{phase['ends_us']:.1f}")
    if "export" in kernel:
        table.add_row("export rows", f"{kernel['export']['mean_us']:.1f}", "", f"{kernel['export']['ends_us']:.1f}")
    if "wait_for_rows" in kernel:
        table.add_row("wait for rows", f"{kernel['wait_for_rows']['us']:.1f}", "", f"{kernel['wait_for_rows']['ends_us']:.1f}")
    console.print(table, highlight=False)
    console.print(Text(OPEN_EXPLAINED, style="dim"))


def _show_gemms(console: Console, kernels: dict[str, dict[str, Any]]) -> None:
    rows = (("begins", "begin_us", False), ("first tile begins", "first_tile_begins_us", False),
            ("... after the end of open_call", "first_tile_after_open_us", False),
            ("last tile ends", "last_consumer_ends_us", False), ("ends", "end_us", False), ("span", "span_us", False),
            ("tail", "tail_us", False), ("after the last tile", "after_last_tile_us", False),
            ("loaders at the gate", "loaders_at_gate", True), ("consumers multiply", "consumers_multiply", True),
            ("consumers emit", "consumers_emit", True), ("consumers wait for inputs", "consumers_wait_for_inputs", True),
            ("first weights asked for", "first_weights_asked_for_us", False),
            ("... by the last block", "last_weights_asked_for_us", False))
    table = simple_table("", *kernels)
    for label, name, share in rows:
        values = [kernel.get(name) for kernel in kernels.values()]
        if any(value is not None for value in values):
            table.add_row(label, *("" if value is None else percent(value) if share else f"{value:.1f}" for value in values))
    console.print(table, highlight=False)
    console.print(Text(GEMM_EXPLAINED, style="dim"))


def _show_jobs(console: Console, kernel: dict[str, Any]) -> None:
    found = {name: kernel[name] for name in ("jobs", "tokens") if name in kernel}
    if not found:
        return
    table = simple_table("gemm_scatter", "count", "first ready", "half ready", "last ready", "last done", "done before last tile",
                         "work, median")
    for name, item in found.items():
        times = (item[f"{when}_us"] for when in ("first_ready", "half_ready", "last_ready", "last_done"))
        table.add_row(name, str(item["count"]), *(f"{time:.1f}" for time in times), percent(item.get("done_before_last_tile")),
                      f"{item['work_us']['p50']:.1f}")
    console.print(table, highlight=False)


def _show_plain(console: Console, kernels: dict[str, dict[str, Any]]) -> None:
    table = simple_table("", "begins", "span", "us, summed over blocks")
    for name, kernel in kernels.items():
        if kernel:
            sums = ", ".join(f"{kind} {us:.0f}" for kind, us in kernel["sum_us"].items())
            table.add_row(name, f"{kernel['begin_us']:.0f}", f"{kernel['span_us']:.0f}", sums)
    console.print(table, highlight=False)
