"""What a trace says about overlap: how much was moved while tiles were computed. Free of the speed of the machine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

# One event: (launch, block, phase, item, begin_ns, ready_ns, end_ns); see moe_tk.runtime.launch.CallStats.trace.
PHASE, BEGIN, READY, END = 2, 4, 5, 6


@dataclass(frozen=True)
class Overlap:
    """Shares in 0..1 over all ranks; None where nothing was moved. All 0 on a path that moves, computes, moves."""

    moved_in: float | None    # of the row movements, those that ended after the rank's first tile had begun
    sent_back: float | None   # of the results, those that were sent before the rank's last tile was done
    half_back: float | None   # point of the call (0 its begin, 1 its end) at which half of the results had been sent


SERIAL = Overlap(moved_in=0.0, sent_back=0.0, half_back=None)


def overlap(traces: Iterable[Sequence[tuple]], begin_ns: int, end_ns: int) -> Overlap:
    """Of the traces of all ranks of one call that lasted from begin_ns to end_ns."""
    moves = late_moves = results = early_results = 0
    sent: list[int] = []
    for trace in traces:
        tiles = [event for event in trace if event[PHASE] in ("gemm1", "gemm2")]
        if not tiles:
            continue
        first, last = min(event[READY] for event in tiles), max(event[END] for event in tiles)
        arrivals = [event[END] for event in trace if event[PHASE] == "dispatch"]
        leaving = [event[END] for event in trace if event[PHASE] == "combine"]
        moves, late_moves = moves + len(arrivals), late_moves + sum(end > first for end in arrivals)
        results, early_results = results + len(leaving), early_results + sum(end < last for end in leaving)
        sent += leaving
    half = sorted(sent)[(len(sent) - 1) // 2] if sent else None
    return Overlap(
        moved_in=late_moves / moves if moves else None, sent_back=early_results / results if results else None,
        half_back=None if half is None else (half - begin_ns) / max(1, end_ns - begin_ns))
