"""Writes the list of ids into docs/doctor.md, between its two marks: python tests/doctor/make_reason_page.py"""

from __future__ import annotations

from pathlib import Path

import reason_examples

from moe_tk.topology.finding_table import KINDS
from moe_tk.topology.reasons import GROUP_REASONS, PAIR_REASONS, fill

PAGE = Path(__file__).parents[2] / "docs" / "doctor.md"
BEGIN, END = "<!-- ids: begin -->", "<!-- ids: end -->"


def sections() -> str:
    lines = []
    for title, reasons in (("Reasons of a group", GROUP_REASONS), ("Reasons of a pair", PAIR_REASONS)):
        lines += [f"### {title}", ""]
        for reason in reasons:
            inputs = reason_examples.REASONS[reason.id]
            lines += entry(reason.id, reason.level, fill(reason.says, inputs), reason.meaning, fill(reason.fix, inputs),
                           f"Changes with: {fill(reason.change, inputs)}.")
    lines += ["### Findings", ""]
    for kind in KINDS.values():
        inputs = reason_examples.FINDINGS[kind.id]
        lines += entry(kind.id, kind.level, fill(kind.says, inputs), kind.meaning, fill(kind.fix, inputs))
    return "\n".join(lines)


def entry(name: str, level: str, example: str, meaning: str, fix: str, change: str = "") -> list[str]:
    return [f"#### `{name}`", "", f"{level}: *{example}*", "", f"{meaning} {change}".strip(), "", f"Fix: {fix}", ""]


def page_with(text: str) -> str:
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n\n{sections()}\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    PAGE.write_text(page_with(PAGE.read_text()))
