"""Say that a build is going on, on stderr, once it has taken more than a second."""

from __future__ import annotations

import sys
import threading
import time
from types import TracebackType
from typing import Any

QUIET_S = 1.0


class BuildProgress:
    """Context of one build: a live line on a terminal (rich), one plain line elsewhere, nothing for a short build."""

    def __init__(self, what: str, total: int, quiet_s: float = QUIET_S) -> None:
        self.what = what
        self._total, self._finished = total, 0
        self._start = time.monotonic()
        self._live: Any = None
        self._task: Any = None
        self._shown = False
        self._lock = threading.Lock()
        self._timer = threading.Timer(quiet_s, self._show)
        self._timer.daemon = True

    def __enter__(self) -> BuildProgress:
        self._timer.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self._timer.cancel()
        with self._lock:
            live, self._live = self._live, None
            shown, self._shown = self._shown, True  # a timer that fires late shows nothing
        if live is not None:
            live.stop()
            if shown and kind is None:
                seconds = time.monotonic() - self._start
                print(f"moe_tk: built {self.what} in {seconds:.1f} s", file=sys.stderr, flush=True)

    def update(self, finished: int, total: int) -> None:
        """`finished` of `total` commands are done."""
        with self._lock:
            self._finished, self._total = finished, total
            if self._live is not None:
                self._live.update(self._task, completed=finished, total=total)

    def _show(self) -> None:
        with self._lock:
            if self._shown:
                return
            self._shown = True
            if sys.stderr.isatty() and self._start_live():
                return
        print(f"moe_tk: building {self.what}, once for this version and machine ...", file=sys.stderr, flush=True)

    def _start_live(self) -> bool:
        try:
            from rich import progress as bars
            from rich.console import Console
        except ImportError:
            return False
        self._live = bars.Progress(bars.SpinnerColumn(), bars.TextColumn("{task.description}"),
                                   bars.BarColumn(bar_width=20), bars.MofNCompleteColumn(), bars.TimeElapsedColumn(),
                                   console=Console(stderr=True), transient=True)
        self._task = self._live.add_task(f"building {self.what}", completed=self._finished, total=self._total)
        self._live.start()
        return True
