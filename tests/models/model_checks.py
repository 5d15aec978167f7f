"""The checks, read from the models themselves. A line of a model says

    //@ holds NAME [-DFLAG ...] [| what is special about it]
    //@ refuted NAME assertion|deadlock [-DFLAG ...] | what is broken [| BUGLOG ids]

`holds`: with these flags the model has no deadlock, no failed assertion and no infinite run.
`refuted`: the same text with -DNAME must be caught. So model and mutant share every line that NAME does not switch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
MODELS = {
    "slot": "single-writer slot with epochs",
    "wrap": "a slot that is not used in every call, and the wrap of the epoch",
    "election": "local election and chunk watermark",
    "barrier": "exchange of headers and the split rank barrier",
    "ring": "ring pool with generations",
    "roles": "dispensers and role hand-over, two ranks",
    "nvlink": "calls over NVLink without a barrier: owners write rows into their receivers' memory",
    "nvlink_overlap": "the two GEMMs of a rank over NVLink, the second inside the first one's end",
    "nvlink_abort": "waits over NVLink that are given up while tiles of whatever data there is are on their way",
    "nvlink_combine": "jobs and own tokens of two ranks over NVLink, from one list each",
    "mega": "Linear 1 and Linear 2 interleaved, with warm-up and ring",
    "abort": "death, abort and results, three ranks",
    "records": "wait records and the abort flag in a reordering memory",
    "timers": "time limits, signs of progress and the grace of local waits",
}
LINE = re.compile(r"^//@ (holds|refuted) (\w+)((?: [-\w=]+)*?)\s*(?:\|\s*(.*))?$")


@dataclass(frozen=True)
class Check:
    """One search: a model with flags, and what must come out ("holds", "assertion" or "deadlock")."""

    model: str
    name: str
    expected: str
    defines: tuple[str, ...]
    text: str
    buglog: str = ""

    @property
    def id(self) -> str:
        return f"{self.model}/{self.name}"

    @property
    def path(self) -> Path:
        return FOLDER / f"{self.model}.pml"

    @property
    def is_mutant(self) -> bool:
        return self.expected != "holds"

    @property
    def flags(self) -> tuple[str, ...]:
        return (f"-D{self.name}", *self.defines) if self.is_mutant else self.defines


def parse_line(model: str, line: str) -> Check:
    """One //@ line; ValueError if it is not one."""
    found = LINE.match(line)
    if not found:
        raise ValueError(f"{model}.pml: cannot read {line!r}")
    kind, name, words, rest = found.groups()
    words = words.split()
    expected = "holds" if kind == "holds" else words.pop(0) if words else ""
    verdicts = ("holds",) if kind == "holds" else ("assertion", "deadlock")
    if expected not in verdicts or not all(word.startswith("-D") for word in words):
        raise ValueError(f"{model}.pml: cannot read {line!r}")
    text, _, buglog = (rest or "").partition("|")
    return Check(model, name, expected, tuple(words), text.strip(), buglog.strip())


def checks_of(model: str) -> list[Check]:
    lines = (FOLDER / f"{model}.pml").read_text().splitlines()
    return [parse_line(model, line) for line in lines if line.startswith("//@")]


def all_checks(only: Iterable[str] = ()) -> list[Check]:
    """Every check of every model in the order in which they stand, or those of the models and model/checks in `only`.

    Raises ValueError for a name that is neither.
    """
    only = set(only)
    models = [model for model in MODELS if not only or model in {name.split("/")[0] for name in only}]
    found = [check for model in models for check in checks_of(model) if not only or only & {check.model, check.id}]
    if unknown := only - {name for check in found for name in (check.model, check.id)}:
        raise ValueError(f"no such check: {', '.join(sorted(unknown))}")
    return found


def switches_of(model: str) -> set[str]:
    """Names that the text of a model tests with #if or #ifdef."""
    lines = (FOLDER / f"{model}.pml").read_text().splitlines()
    conditions = [line for line in lines if re.match(r"\s*#\s*(if|ifdef|ifndef|elif)\b", line)]
    return {name for line in conditions for name in re.findall(r"\b[A-Z][A-Z0-9_]+\b", line)}
