"""Compiles and runs the native test programs; needs a C++20 compiler and nothing else."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
RACE_STATUS = 66  # exit status of a program in which ThreadSanitizer has found something
# program: (source, flags). ThreadSanitizer does not know fences (-Wtsan); no host path depends on one.
PROGRAMS = {
    "threads": ("threads.cpp", ("-O1", "-g1", "-fsanitize=thread", "-Wno-tsan")),
    "reorder": ("reorder.cpp", ("-O1",)),
    "plain": ("threads.cpp", ("-O2",)),
}


def compile_command(compiler: tuple[str, ...], program: str, target: Path, root: Path = REPO) -> list[str]:
    """The command that makes `program` of the headers under `root`/tk_kernels."""
    source, flags = PROGRAMS[program]
    common = ("-std=c++20", "-Wall", "-Wextra", "-pthread", f"-I{root}", "-include", str(HERE / "random_delay.hpp"))
    return [*compiler, *common, *flags, str(HERE / source), "-o", str(target)]


def run_program(program: Path, *options: str, limit_s: float = 120) -> subprocess.CompletedProcess:
    """Runs a compiled program; options are key=value. Raises subprocess.TimeoutExpired."""
    return subprocess.run([str(program), *options], capture_output=True, text=True, timeout=limit_s)


def verdict_of(done: subprocess.CompletedProcess) -> dict:
    """What a program said in its last line: verdict ("passed" or what went wrong), what, tokens_checked, calls."""
    assert done.stdout, f"status {done.returncode}: {done.stderr[-2000:]}"
    return json.loads(done.stdout.splitlines()[-1])
