"""The offset between two GPUs' clocks, from words that they sent each other."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Offset:
    """What is to be added to the other rank's clock to come to the asking one's, and by how much that may be wrong (ns)."""

    offset_ns: float
    error_ns: float


def offset_of(samples: np.ndarray) -> Offset | None:
    """From [rounds, 3] ns: asking clock before and after a round, answering clock between. None without a whole round.

    The answer was given between the two, so each round bounds the offset; together they leave the interval
    [max(before - answer), min(after - answer)]. Its middle is taken; half its length is the error. (If clocks drift, or a timer
    ticks coarsely, the two ends may cross: then the error is that of the crossing.)
    """
    before, after, answer = (samples[:, i].astype(np.int64) for i in range(3))
    whole = (after > 0) & (answer > 0)
    if not whole.any():
        return None
    low = int((before - answer)[whole].max())
    high = int((after - answer)[whole].min())
    return Offset((low + high) / 2, max(abs(high - low) / 2, 0.5))


def between(first: Offset | None, second: Offset | None) -> Offset:
    """Of a moment between two measurements; the error covers both."""
    known = [offset for offset in (first, second) if offset is not None]
    if not known:
        return Offset(0.0, float("inf"))
    middle = sum(offset.offset_ns for offset in known) / len(known)
    return Offset(middle, max(offset.error_ns + abs(offset.offset_ns - middle) for offset in known))
