"""A trace in memory: one rank's laps as columns, and the call they belong to. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(frozen=True, eq=False)
class Laps:
    """Columns of equal length, one entry per lap, sorted by (kernel, block, writer) and then as they were written."""

    kernel: np.ndarray  # int, index into RankTrace.kernels
    block: np.ndarray   # int
    writer: np.ndarray  # int, warp of the block
    kind: np.ndarray    # int, index into the back end's kinds
    detail: np.ndarray  # int: see kinds.details_of()
    begin: np.ndarray   # float ns since RankTrace.origin_ns
    end: np.ndarray     # float ns

    def __len__(self) -> int:
        return len(self.kind)

    def where(self, chosen: np.ndarray) -> Laps:
        """The laps of a mask."""
        return Laps(*(getattr(self, name)[chosen] for name in LAP_COLUMNS))


LAP_COLUMNS = ("kernel", "block", "writer", "kind", "detail", "begin", "end")


@dataclass(frozen=True, eq=False)
class RankTrace:
    """One rank's call."""

    rank: int
    backend: str                 # "cuda" or "cpu"
    kernels: tuple[str, ...]
    laps: Laps
    blocks_begun: np.ndarray     # [n, 3] float: kernel, block, ns since origin_ns when it began
    origin_ns: int               # on the clock of this rank's GPU, or the machine's
    offset_ns: float = 0.0       # what is to be added to come to rank 0's clock
    offset_error_ns: float = 0.0
    lost: int = 0                # laps that found no room
    clock: dict[str, float] = field(default_factory=dict)  # what the decoder found out about the clocks
    call: dict[str, Any] = field(default_factory=dict)     # shape, tokens, mode, time of such a call


@dataclass(frozen=True, eq=False)
class Trace:
    """All ranks of one call, on one clock."""

    ranks: tuple[RankTrace, ...]
    call: dict[str, Any]

    @property
    def begin_ns(self) -> float:
        """Of the first block of any rank, ns since the first rank's origin."""
        return min(self.shift(rank) + rank.blocks_begun[:, 2].min() for rank in self.ranks if len(rank.blocks_begun))

    @property
    def end_ns(self) -> float:
        """Of the last lap of any rank."""
        return max(self.shift(rank) + rank.laps.end.max() for rank in self.ranks if len(rank.laps))

    def shift(self, rank: RankTrace) -> float:
        """What is to be added to a rank's times to come to those of the first rank."""
        return float(rank.origin_ns - self.ranks[0].origin_ns) + rank.offset_ns - self.ranks[0].offset_ns
