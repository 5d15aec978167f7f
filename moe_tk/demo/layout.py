"""The few shapes that the report is made of."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text


def section(console: Console, title: str, *explanation: str) -> None:
    """A heading with a line, and what one sees below it."""
    console.print()
    console.rule(Text(title, style="bold"), align="left", style="dim")
    for line in explanation:
        console.print(Text(line, style="dim"))


def simple_table(*columns: str, gap: int = 2) -> Table:
    """A table without frame: names on the left, numbers on the right, at least gap + 1 blanks between."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 0, 0, gap), header_style="bold", show_edge=False)
    for index, name in enumerate(columns):
        table.add_column(name, justify="left" if index == 0 else "right", no_wrap=index == 0, overflow="fold")
    return table


def percent(share: float | None) -> str:
    """"42 %", "-" for None."""
    return "-" if share is None else f"{100 * share:.0f} %"


def ratio(value: float | None) -> str:
    """"1.23", "-" for None."""
    return "-" if value is None else f"{value:.2f}"
