"""What is going on while it works: a bar on a terminal, one plain line per stage elsewhere. On stderr, apart from the report."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn


class ShowProgress:
    """Context of one run; call it with (stage, calls done since the last time). Silent where `quiet`."""

    def __init__(self, total: int, *, quiet: bool = False) -> None:
        self.total, self.quiet = total, quiet
        self.stage = ""
        self._start = time.monotonic()
        self._live: Progress | None = None

    def __enter__(self) -> ShowProgress:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._live is not None:
            self._live.stop()

    def __call__(self, stage: str, done: int) -> None:
        """stage "" leaves the stage as it is."""
        new = bool(stage) and stage != self.stage
        self.stage = stage or self.stage
        if self._live is None and not self.quiet and sys.stderr.isatty():
            self._start_bar()  # not earlier: a build before the first stage shows its own
        if self._live is not None:
            self._live.update(self._task, description=self.stage, advance=done)
        elif new and not self.quiet:
            print(f"moe_tk demo: {time.monotonic() - self._start:5.1f} s  {stage}", file=sys.stderr, flush=True)

    def _start_bar(self) -> None:
        self._live = Progress(SpinnerColumn(), TextColumn("{task.description}"), BarColumn(bar_width=24), MofNCompleteColumn(),
                              TimeElapsedColumn(), console=Console(stderr=True), transient=True)
        self._task = self._live.add_task("", total=self.total)
        self._live.start()
