"""The generated part of docs/protocols.md: the table of models, states and mutants, from the committed results."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "protocols.md"
RESULTS = ROOT / "benchmarks" / "results" / "model_checking.json"
FOUND_AS = {"assertion": "wrong data or a broken promise", "deadlock": "ranks wait for ever"}


def models_table(record: dict) -> str:
    """What holds: one row per model and configuration."""
    lines = ["| model | configuration | states | longest run, steps | mutants refuted |", "|---|---|---:|---:|---:|"]
    for model, title in record["models"].items():
        rows = [row for row in record["checks"] if row["model"] == model]
        mutants = [row for row in rows if row["expected"] != "holds"]
        refuted = sum(row["verdict"] == row["expected"] for row in mutants)
        for place, row in enumerate(row for row in rows if row["expected"] == "holds"):
            name = f"[{model}](../tests/models/{model}.pml): {title}" if place == 0 else ""
            count = f"{refuted} of {len(mutants)}" if place == 0 else ""
            text = f"`{row['name']}`" + (f": {row['text']}" if row["text"] else "")
            lines.append(f"| {name} | {text} | {row['states']:,} | {row['depth']:,} | {count} |")
    rows = record["checks"]
    holds = [row for row in rows if row["expected"] == "holds"]
    states = sum(row["states"] for row in holds)
    lines += ["", f"{len(holds)} configurations with {states:,} states hold: no deadlock, no failed assertion, no infinite "
                  f"run. {len(rows) - len(holds)} mutants are refuted. {record['versions']['spin']}; "
                  f"{sum(row['seconds'] for row in rows):.0f} s of search on {record['machine']}, {record['date']}."]
    return "\n".join(lines)


def mutants_table(record: dict) -> str:
    """What is refuted: one row per mutant."""
    lines = ["| model | mutant | what is broken in it | seen as | BUGLOG |", "|---|---|---|---|---|"]
    for row in record["checks"]:
        if row["expected"] != "holds":
            lines.append(f"| {row['model']} | `{row['name']}` | {row['text']} | {FOUND_AS[row['verdict']]} | {row['buglog']} |")
    return "\n".join(lines)


PARTS = {"models": models_table, "mutants": mutants_table}


def marked(name: str, text: str) -> re.Match[str]:
    """The part `name` of the page: between <!-- generated: name --> and <!-- end -->."""
    found = re.search(rf"(<!-- generated: {name} -->\n)(.*?)(\n<!-- end -->)", text, re.DOTALL)
    if not found:
        raise ValueError(f"{PAGE.name} has no part {name}")
    return found


def write_page(record: dict) -> None:
    text = PAGE.read_text()
    for name, make in PARTS.items():
        found = marked(name, text)
        text = text[: found.start(2)] + make(record) + text[found.end(2):]
    PAGE.write_text(text)
