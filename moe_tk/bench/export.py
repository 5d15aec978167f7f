"""The run as JSON: docs/benchmarks.md names the fields. Written at once or not at all, after every line."""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from moe_tk.bench.options import Options
from moe_tk.bench.routing_cost import with_routing_costs
from moe_tk.bench.routings import label
from moe_tk.errors import MoETkError

SCHEMA = "moe_tk.bench_layer/1"


def to_json(options: Options, environment: dict[str, Any], lines: list[dict[str, Any]], seconds: float) -> dict[str, Any]:
    """Times in microseconds of a call, median of the slower rank; sizes in bytes."""
    asked = {name: value for name, value in asdict(options).items() if name not in ("shapes", "numbers", "debug")}
    paths = [path for path in (options.json_path, options.plot_path) if path]
    asked |= {name: asked[name].name if asked[name] else None for name in ("json_path", "plot_path")}
    asked["routings"] = [label(spec) for spec in options.routings]
    command = environment["command"]
    for path in paths:  # where the files went on that machine says nothing to a reader
        command = command.replace(str(path), path.name)
    for spec in options.routings:
        command = command.replace(spec, label(spec))
    environment = {**environment, "command": command}
    if options.backend != "cpu":  # the floor is a GPU's
        lines = with_routing_costs(lines)
    return {"schema": SCHEMA, "environment": environment, "machine_numbers": asdict(options.numbers), "arguments": asked,
            "seconds": round(seconds, 1), "complete": len(lines) == options.total_lines, "lines": lines}


def write_json(path: Path, record: dict[str, Any]) -> None:
    """Raises MoETkError when the file cannot be written."""
    write_text("--json", path, json.dumps(record, indent=1, allow_nan=False) + "\n")


def write_text(option: str, path: Path, text: str) -> None:
    """The whole file or what was there before."""
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(name, 0o644)
        os.replace(name, path)
    except OSError as error:
        raise MoETkError(f"{option} {path}: cannot be written: {error.strerror}") from error
