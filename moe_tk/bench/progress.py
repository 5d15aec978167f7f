"""What is going on while it measures: a bar on a terminal, one plain line for each stage elsewhere. On stderr."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn


class ShowProgress:
    """Context of one run; call it with ("stage", text) or ("line", line). Keeps the lines; `on_line` is told of each."""

    def __init__(self, total: int, on_line: Any, *, quiet: bool = False) -> None:
        self.on_line, self.quiet = on_line, quiet
        self._start = time.monotonic()
        self._live: Progress | None = None
        if not quiet and sys.stderr.isatty():
            self._live = Progress(SpinnerColumn(), TextColumn("{task.description}"), BarColumn(bar_width=24), MofNCompleteColumn(),
                                  TimeElapsedColumn(), console=Console(stderr=True), transient=True)
            self._task = self._live.add_task("", total=total)

    def __enter__(self) -> ShowProgress:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._live is not None:
            self._live.stop()

    def __call__(self, kind: str, what: Any) -> None:
        if kind == "line":
            self.on_line(what)
        if self._live is not None:
            self._live.update(self._task, advance=kind == "line", **({"description": what} if kind == "stage" else {}))
        elif kind == "stage" and not self.quiet:
            print(f"moe_tk bench layer: {time.monotonic() - self._start:5.1f} s  {what}", file=sys.stderr, flush=True)
