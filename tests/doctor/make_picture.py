"""The picture of a saved report: python tests/doctor/make_picture.py REPORT.json OUT.svg [COLUMNS] [dark|light]

Draws what a terminal shows, as SVG with a local monospace font. A PNG beside it if cairosvg is installed.
"""

from __future__ import annotations

import io
import json
import re
import sys
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import DEFAULT_TERMINAL_THEME, MONOKAI

from moe_tk.cli.doctor_view import show
from moe_tk.topology.report import facts_from_json, make_report

CELL, ADVANCE = 12.2, 1233 / 2048  # rich's cell width in pixels; the font's advance in em
FONT = "DejaVu Sans Mono, Menlo, Consolas, monospace"


def picture(source: Path, columns: int, theme: str) -> str:
    snapshot, probes = facts_from_json(json.loads(source.read_text()))
    console = Console(width=columns, record=True, file=io.StringIO(), force_terminal=True, color_system="truecolor",
                      highlight=False)
    show(make_report(snapshot, probes, source=str(source)), console=console)
    command = f"moe_tk doctor --snapshot {source.name}"
    svg = console.export_svg(title=command, theme=MONOKAI if theme == "dark" else DEFAULT_TERMINAL_THEME, unique_id="doctor")
    svg = re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)  # fonts from a server
    svg = re.sub(r"font-family: (?:Fira Code|arial)[^;]*;", f"font-family: {FONT};", svg)
    svg = svg.replace("font-size: 20px", f"font-size: {CELL / ADVANCE:.3f}px")
    svg = re.sub(r"<!--.*?-->", "", svg, flags=re.DOTALL)
    svg = re.sub(r' textLength="[^"]*"', "", svg)  # the font fits the cells
    return "\n".join(line.rstrip() for line in svg.splitlines()) + "\n"


def main(source: str, out: str, columns: str = "80", theme: str = "dark") -> None:
    Path(out).write_text(picture(Path(source), int(columns), theme))
    try:
        import cairosvg
    except ImportError:
        return
    # a cell of whole pixels: hinting would shift the columns
    cairosvg.svg2png(url=out, write_to=str(Path(out).with_suffix(".png")), scale=15 / CELL)


if __name__ == "__main__":
    main(*sys.argv[1:])
