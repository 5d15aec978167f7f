"""Wait records on disk: written when a call fails, read by `moe_tk explain-timeout`."""

from __future__ import annotations

import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

from moe_tk.config import env
from moe_tk.errors import ArgumentError

VERSION = 1


def write_records(records: list[dict], *, op: str, rank: int, world: int, dead: list[int], message: str) -> Path | None:
    """Writes what this rank knows into MOE_TK_RECORD_DIR (default: the temporary folder); None if that cannot be written."""
    folder = Path(env("MOE_TK_RECORD_DIR") or tempfile.gettempdir())
    content = {"version": VERSION, "op": op, "rank": rank, "world": world, "dead": dead, "message": message,
               "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "records": records}
    path = folder / f"moe_tk-wait-{os.getpid()}-{rank}.json"
    try:
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
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ArgumentError(f"{path} cannot be read as a wait record: {error}") from None
    if not isinstance(content, dict) or content.get("version") != VERSION or "records" not in content:
        raise ArgumentError(f"{path} is not a wait record of version {VERSION}")
    return content
