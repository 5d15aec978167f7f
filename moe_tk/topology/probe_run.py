"""Runs probe steps in killable children: a step that hangs costs its limit, names itself, and ends no report."""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moe_tk.topology.child import kill_group
from moe_tk.topology.probe_plan import Step, pairs_of

STEP_LIMIT_S, START_LIMIT_S, TOTAL_LIMIT_S = 20.0, 60.0, 240.0
_IN_KERNEL_SHARE = 0.25  # a kernel gives up long before its process is killed
_LONGER = {"gemm": 4.0}  # steps that may take a multiple of the limit: this one imports torch


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds: of one step, of a child's start (contexts of all GPUs), of everything."""

    step_s: float = STEP_LIMIT_S
    start_s: float = START_LIMIT_S
    total_s: float = TOTAL_LIMIT_S


@dataclass(slots=True)
class StepResult:
    """how: "ok", "error", "timeout" or "skipped". data: the child's answer; text: what went wrong."""

    step: Step
    how: str
    data: dict[str, Any] = field(default_factory=dict)
    text: str = ""
    seconds: float = 0.0


def child_command() -> list[str]:
    return [sys.executable, str(Path(__file__).with_name("probe_child.py"))]


class _Child:
    """One probe process and the lines it has printed."""

    def __init__(self, command: Sequence[str], environ: Mapping[str, str], plan: dict[str, Any]) -> None:
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                        env=dict(environ), text=True, errors="replace", start_new_session=True)
        self.events: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self.stderr: list[str] = []
        for target in (self._read_events, self._read_errors):
            threading.Thread(target=target, daemon=True).start()
        try:
            assert self.process.stdin is not None
            self.process.stdin.write(json.dumps(plan))
            self.process.stdin.close()
        except BrokenPipeError:  # it died at once; the events say so
            pass

    def _read_events(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            try:
                self.events.put(json.loads(line))
            except ValueError:  # something a library printed
                continue
        self.events.put(None)

    def _read_errors(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.stderr.append(line.rstrip())

    def next(self, seconds: float) -> dict[str, Any] | None:
        """The next event; None at the end of its output. Raises queue.Empty when it takes too long."""
        return self.events.get(timeout=max(0.0, seconds))

    def end(self) -> None:
        if self.process.poll() is None:
            kill_group(self.process)

    def last_words(self) -> str:
        time.sleep(0.05)  # its stderr is read by another thread
        return self.stderr[-1] if self.stderr else f"it ended with status {self.process.poll()}"


def run_steps(steps: Sequence[Step], *, library: str, devices: int, environ: Mapping[str, str],
              limits: Limits = Limits(), command: Sequence[str] | None = None,  # noqa: B008
              progress: Callable[[int, int, Step], None] | None = None) -> list[StepResult]:
    """Run every step in order; always returns one result for each, in bounded time (limits.total_s and one step).

    A child that hangs is killed and a new one goes on; the pair it hung on is left alone afterwards. After an error
    that poisoned a CUDA context a new child starts too.
    """
    run = _Run(list(steps), library, devices, environ, limits, list(command or child_command()), progress)
    return run.all()


@dataclass(slots=True)
class _Run:
    steps: list[Step]
    library: str
    devices: int
    environ: Mapping[str, str]
    limits: Limits
    command: list[str]
    progress: Callable[[int, int, Step], None] | None
    results: dict[int, StepResult] = field(default_factory=dict)
    hung: set[tuple[int, int]] = field(default_factory=set)
    deadline: float = 0.0

    def all(self) -> list[StepResult]:
        self.deadline = time.monotonic() + self.limits.total_s
        while left := self._left():
            if time.monotonic() > self.deadline:
                self._skip(left, f"no time left (limit {self.limits.total_s:g} s in all)")
                break
            if not self._one_child(left):
                break
        return [self.results[number] for number in range(len(self.steps))]

    def _left(self) -> list[int]:
        for number, step in enumerate(self.steps):
            if number not in self.results and (bad := pairs_of(step) & self.hung):
                self.results[number] = StepResult(step, "skipped", text=f"an earlier probe hung on {sorted(bad)[0]}")
        return [number for number in range(len(self.steps)) if number not in self.results]

    def _skip(self, numbers: list[int], why: str) -> None:
        for number in numbers:
            self.results[number] = StepResult(self.steps[number], "skipped", text=why)

    def _one_child(self, left: list[int]) -> bool:
        """Feed one child all that is left, until it is through, fails or hangs. False when nothing can be run."""
        plan = {"library": self.library, "devices": self.devices, "steps": [[n, self.steps[n]] for n in left],
                "limit_s": self.limits.step_s * _IN_KERNEL_SHARE}
        child = _Child(self.command, self.environ, plan)
        try:
            return self._listen(child, left)
        finally:
            child.end()

    def _listen(self, child: _Child, left: list[int]) -> bool:
        at: int | None = None
        began = time.monotonic()
        limit = self.limits.start_s
        while True:
            try:
                event = child.next(min(began + limit, self.deadline + self.limits.step_s) - time.monotonic())
            except queue.Empty:
                if at is None:
                    self._skip(left, f"the probe process did not start within {limit:g} s")
                    return False
                self._kill(at, time.monotonic() - began, limit)
                return True
            if event is None or "fatal" in event:
                text = event["fatal"] if event else child.last_words()
                if at is None:
                    self._skip(left, f"the probe process failed: {text}")
                    return False
                self.results[at] = StepResult(self.steps[at], "error", text=f"the probe process died: {text}",
                                              seconds=time.monotonic() - began)
                return True
            if event.get("done"):
                return True
            if "begin" in event:
                at, began = event["begin"], time.monotonic()
                limit = self.limits.step_s * _LONGER.get(self.steps[at]["do"], 1.0)
                if self.progress is not None:
                    self.progress(at, len(self.steps), self.steps[at])
                if began > self.deadline:
                    return True
            elif "end" in event:
                seconds = time.monotonic() - began
                how = "error" if "error" in event else "ok"
                self.results[event["end"]] = StepResult(self.steps[event["end"]], how, event.get("result", {}),
                                                        event.get("error", ""), seconds)
                began = time.monotonic()

    def _kill(self, at: int, seconds: float, limit: float) -> None:
        """Note the step that is being killed: it hung, or all the time is up and it proves nothing about the pair."""
        step = self.steps[at]
        if seconds < limit - 0.05:
            self._skip([at], f"no time left (limit {self.limits.total_s:g} s in all)")
            return
        self.results[at] = StepResult(step, "timeout", text=f"killed after {seconds:.1f} s", seconds=seconds)
        self.hung |= pairs_of(step)
