"""Helpers of the packaging tests: a copy of the checkout, and what is built from it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
LEFT_OUT = shutil.ignore_patterns(".git", ".venv", "build", "dist", "*.egg-info", "__pycache__", ".*_cache",
                                  ".hypothesis", "tests", "docs", "benchmarks", "tutorials", "data")


def copy_checkout(target: Path) -> Path:
    """What packaging needs of the checkout, without the (large) data: tests write their own."""
    shutil.copytree(REPO, target, ignore=LEFT_OUT)
    return target


def run(*command: str, cwd: Path, **environment: str) -> str:
    """stdout of a command that must succeed."""
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=300, stdin=subprocess.DEVNULL,
                          env={**os.environ, **environment})
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def build_wheel(checkout: Path) -> Path:
    run(sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", "wheels", ".",
        cwd=checkout)
    [wheel] = (checkout / "wheels").glob("*.whl")
    return wheel
