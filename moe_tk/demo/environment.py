"""Where a run took place, for its JSON."""

from __future__ import annotations

import os
import platform
import shlex
import sys
from datetime import datetime, timezone
from importlib import metadata
from typing import Any

import moe_tk

PACKAGES = ("torch", "numpy", "safetensors", "rich", "pybind11")


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def environment() -> dict[str, Any]:
    """Versions, machine, date (UTC) and command."""
    return {
        "moe_tk": moe_tk.__version__, "python": platform.python_version(),
        **{name: _version(name) for name in PACKAGES}, "system": platform.platform(), "cpu": _cpu_name(), "cores": usable_cores(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"), "command": shlex.join(["moe_tk", *sys.argv[1:]]),
    }


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "unknown"


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine() or "unknown"
