"""`moe_tk explain-timeout FILE`: a wait record as a small graph of who waits for whom."""

from __future__ import annotations

import argparse

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from moe_tk.runtime.faults import died, place_of, roots
from moe_tk.runtime.records import read_records


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the subcommand."""
    parser.add_argument("file", help="the file that a ProtocolTimeout or PeerLost names")


def _why(rank: int, content: dict) -> str:
    """What is known of a rank that waits for nobody."""
    record = next((r for r in content["records"] if r["rank"] == rank), None)
    if record is None and rank in died(content["records"], set(content["dead"])):
        return "its process died"
    if record is None:
        return "left no record: it never made this call, is stopped, or is busy in its own code"
    if record["kind"] == "host":
        return "raised an exception in the middle of the call, or its program ended there: read its traceback"
    if record["kind"] == "told_by_peer":
        return "was at work, or waited for its own blocks only, when it was told to stop"
    return "waited for its own blocks only"


def graph_lines(content: dict) -> list[str]:
    """One line per rank: an arrow to each rank that it waits for, or why it waits for none."""
    start = roots(content["records"], set(content["dead"]))
    lines = []
    for rank in range(content["world"]):
        record = next((r for r in content["records"] if r["rank"] == rank), None)
        if record and record["missing"]:
            targets = ", ".join(f"rank {missing}" for missing in record["missing"])
            late = "   <== start here: it came to this wait when the others had waited long" if rank in start else ""
            lines.append(f"rank {rank} --[ {place_of(record)}, {record['seconds']:.2f} s ]--> {targets}{late}")
        elif rank in start:
            lines.append(f"rank {rank} <== start here: {_why(rank, content)}")
        else:
            lines.append(f"rank {rank} {_why(rank, content)}")
    return lines


def run(args: argparse.Namespace) -> int:
    """Prints the graph and the records. Returns 0."""
    content = read_records(args.file)
    console = Console()
    seen = f"{content['world']} ranks, as rank {content['rank']} saw it, {content['time']}"
    console.print(f"[bold]{escape(content['op'])}[/bold], {seen}")
    console.print()
    for line in graph_lines(content):
        console.print("  " + escape(line), style="bold" if "start here" in line else None, highlight=False)
    console.print()
    table = Table("rank", "ended by", "phase", "role", "block", "slot", "wanted", "seen", "seconds", box=None)
    for record in content["records"]:
        table.add_row(*(str(record[k]) for k in ("rank", "kind", "phase", "role", "block", "slot", "expected", "seen")),
                      f"{record['seconds']:.2f}")
    console.print(table)
    console.print()
    console.print(escape(content["message"]), highlight=False)
    return 0
