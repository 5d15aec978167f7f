"""A child process that cannot outlive its limit: started in its own process group, killed as one."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

KILL_GRACE_S = 2.0


@dataclass(frozen=True, slots=True)
class Ended:
    """How it ended: "ok" (status 0), "failed", "timeout" (killed) or "stuck" (killed, but the kernel holds it)."""

    how: str
    status: int | None
    stdout: str
    stderr: str
    seconds: float

    @property
    def last_words(self) -> str:
        """The last line of stderr: what a person wants to see first."""
        lines = [line for line in self.stderr.strip().splitlines() if line.strip()]
        return lines[-1].strip() if lines else ""


def kill_group(process: subprocess.Popen) -> bool:
    """SIGKILL to the child's process group; False if it is still there after a grace (held by the kernel)."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        process.kill()
    try:
        process.wait(KILL_GRACE_S)
    except subprocess.TimeoutExpired:
        return False
    return True


def run_child(command: Sequence[str], limit_s: float, *, env: Mapping[str, str] | None = None,
              stdin: str = "") -> Ended:
    """Run to the end or to the limit, whichever is first. Raises nothing but what starting the program raises."""
    began = time.monotonic()
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                               env=dict(env) if env is not None else None, text=True, errors="replace",
                               start_new_session=True)
    try:
        out, err = process.communicate(stdin, timeout=limit_s)
    except subprocess.TimeoutExpired:
        gone = kill_group(process)
        out, err = process.communicate() if gone else ("", "")
        return Ended("timeout" if gone else "stuck", None, out, err, time.monotonic() - began)
    how = "ok" if process.returncode == 0 else "failed"
    return Ended(how, process.returncode, out, err, time.monotonic() - began)
