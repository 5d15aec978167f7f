"""Run the commands of one build through ninja, and find the one that failed."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

TAIL_LINES = 20

# Each command runs under this script, so that its own stderr and exit status are known whatever ninja's version.
_RUNNER = """\
out=$1; shift
"$@" >"$out.stdout" 2>"$out.stderr"
status=$?
echo "$status" >"$out.status"
cat "$out.stdout"; cat "$out.stderr" >&2
exit "$status"
"""

# Ninja runs under this one. Its standard input ends when the builder dies, however it dies: then ninja is told to stop,
# which ends the compilers too.
_SUPERVISOR = """\
exec 3<&0
"$@" </dev/null 3<&- & ninja=$!
{ read -r line <&3; kill -TERM "$ninja"; } >/dev/null 2>&1 & watch=$!
exec 3<&-
wait "$ninja"; status=$?
kill "$watch" 2>/dev/null
exit "$status"
"""
_STOP_S = 10


@dataclass(frozen=True, slots=True)
class Step:
    """One command: it makes `output` (a file name in the work folder) from `inputs`."""

    output: str
    inputs: tuple[str, ...]
    command: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StepFailure:
    """The first command that failed. `status` is its exit status, 128 + n after signal n, None when unknown."""

    command: str
    status: int | None
    stderr: str

    @property
    def tail(self) -> str:
        return "\n".join(self.stderr.rstrip().splitlines()[-TAIL_LINES:])


@dataclass(frozen=True, slots=True)
class StepsResult:
    log: str
    failure: StepFailure | None


def run_steps(ninja: Path, folder: Path, steps: Sequence[Step], *, jobs: int, environment: dict[str, str],
              on_progress: Callable[[int, int], None]) -> StepsResult:
    """Run all steps in `folder`, `jobs` at a time. Calls on_progress(finished, total). OSError if it cannot start."""
    (folder / "run.sh").write_text(_RUNNER)
    (folder / "build.ninja").write_text(_ninja_text(steps))
    environment = {**environment, "NINJA_STATUS": "[%f/%t] "}
    command = ["/bin/sh", "-c", _SUPERVISOR, "sh", str(ninja), "-C", str(folder), "-j", str(jobs)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                               text=True, errors="replace", env=environment)
    assert process.stdout is not None
    seen = []
    try:
        for line in process.stdout:
            seen.append(line)
            if match := re.match(r"\[(\d+)/(\d+)\] ", line):
                on_progress(int(match[1]), int(match[2]))
        status = process.wait()
    finally:
        try:  # after an interrupt this stops the compilers and waits for their end
            process.communicate(timeout=_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
    failure = None if status == 0 else _failure(folder, steps, "".join(seen), status)
    return StepsResult(_log_text(folder, steps, "".join(seen)), failure)


def _ninja_text(steps: Sequence[Step]) -> str:
    lines = ["ninja_required_version = 1.5", "rule run", "  command = /bin/sh run.sh $out $argv",
             "  description = $out", ""]
    for step in steps:
        inputs = " ".join(_escape_path(path) for path in step.inputs)
        lines += [f"build {_escape_path(step.output)}: run {inputs}",
                  f"  argv = {shlex.join(step.command).replace('$', '$$')}", ""]
    return "\n".join(lines)


def _escape_path(path: str) -> str:
    return path.replace("$", "$$").replace(" ", "$ ").replace(":", "$:")


def _failure(folder: Path, steps: Sequence[Step], ninja_output: str, status: int) -> StepFailure:
    for step in steps:
        step_status = _status_of(folder, step)
        if step_status not in (0, None):
            return StepFailure(shlex.join(step.command), step_status, _read(folder / f"{step.output}.stderr")
                               or _read(folder / f"{step.output}.stdout"))
    for step in steps:  # started, but its runner could not even note a status: killed with it, or the disk is full
        if (folder / f"{step.output}.stdout").exists() and _status_of(folder, step) is None:
            return StepFailure(shlex.join(step.command), None, _read(folder / f"{step.output}.stderr") or ninja_output)
    return StepFailure(f"ninja -C {folder}", status, ninja_output)


def _status_of(folder: Path, step: Step) -> int | None:
    text = _read(folder / f"{step.output}.status").strip()
    return int(text) if text.isdigit() else None


def _log_text(folder: Path, steps: Sequence[Step], ninja_output: str) -> str:
    parts = []
    for step in steps:
        status = _status_of(folder, step)
        parts.append(f"$ {shlex.join(step.command)}\n{_read(folder / f'{step.output}.stdout')}"
                     f"{_read(folder / f'{step.output}.stderr')}"
                     f"-> {'not finished' if status is None else f'status {status}'}\n")
    return "\n".join([*parts, "ninja:", ninja_output])


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
