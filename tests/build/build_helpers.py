"""Helpers of the build tests: small programs, fresh interpreters, a look at the process table."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]


def write_program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def run_python(code: str, **kwargs) -> subprocess.CompletedProcess:
    """Run code in a new interpreter that finds this checkout."""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120,
                          cwd=kwargs.pop("cwd", REPO), stdin=subprocess.DEVNULL, **kwargs)


def processes_with(text: str) -> list[int]:
    """Ids of the processes that have `text` in their command line."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if text.encode() in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                pass
    return found
