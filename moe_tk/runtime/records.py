"""Wait records on disk: written when a call fails, read by `moe_tk explain-timeout`."""

from __future__ import annotations

import itertools
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

from moe_tk.config import env
from moe_tk.errors import ArgumentError

VERSION = 1
FIELDS = {"op": str, "rank": int, "world": int, "dead": list, "message": str, "time": str, "records": list}
RECORD_FIELDS = {"rank": int, "producer": int, "phase": str, "role": str, "kind": str, "block": int, "slot": int, "expected": int,
                 "seen": int, "seconds": float, "missing": list}
_numbers = itertools.count(1)


def write_records(records: list[dict], *, op: str, rank: int, world: int, dead: list[int], message: str) -> Path | None:
    """Writes what this rank knows into MOE_TK_RECORD_DIR (default: the temporary folder), in a file of its own; None if that
    cannot be written: the error of the call must not give way to another."""
    content = {"version": VERSION, "op": op, "rank": rank, "world": world, "dead": dead, "message": message,
               "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "records": records}
    try:
        folder = Path(env("MOE_TK_RECORD_DIR") or tempfile.gettempdir())
        path = folder / f"moe_tk-wait-{os.getpid()}-{rank}-{next(_numbers)}.json"
        folder.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps(content, indent=1))
        temporary.replace(path)
    except OSError:
        return None
    return path


def read_records(path: str | Path) -> dict[str, Any]:
    """Content of a file of write_records. Raises ArgumentError when it is not one."""
    try:
        content = json.loads(Path(path).read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ArgumentError(f"{path} cannot be read as a wait record: {error}") from None
    if not isinstance(content, dict) or content.get("version") != VERSION:
        raise ArgumentError(f"{path} is not a wait record of version {VERSION}")
    problem = _problem(content)
    if problem:
        raise ArgumentError(f"{path} is not a whole wait record: {problem}")
    return content


def _problem(content: dict[str, Any]) -> str | None:
    """What keeps the content of a file from being what write_records wrote."""
    problem = _wrong_field(content, FIELDS)
    if problem or not 1 <= content["world"] <= 64:
        return problem or f"world is {content['world']}"
    ranks = range(content["world"])
    for number, record in enumerate(content["records"]):
        problem = _wrong_field(record, RECORD_FIELDS) if isinstance(record, dict) else "it is no table"
        if not problem and (record["rank"] not in ranks or any(rank not in ranks for rank in record["missing"])):
            problem = f"it names a rank outside 0..{len(ranks) - 1}"
        if problem:
            return f"record {number}: {problem}"
    return None if all(rank in ranks for rank in content["dead"]) else f"dead is {content['dead']}"


def _wrong_field(table: dict[str, Any], fields: dict[str, type]) -> str | None:
    """The first field that is missing or of another type; a float may be written as an integer."""
    for name, kind in fields.items():
        if not isinstance(table.get(name), (int, float) if kind is float else kind):
            return f"{name} is {str(table.get(name, 'missing'))[:40]!r}"
    return None
