"""From the memory of the stamps to laps in nanoseconds.

A lap holds the low halves of %globaltimer at its ends, a block's header the whole timer when the block began. All multiprocessors
of a GPU read the same timer, so laps of different blocks compare within its period (32 ns on H200, found out here). The
multiprocessor's own clock tells at what rate it ran.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from moe_tk.errors import MoETkError
from moe_tk.trace.kinds import CONSUMER_WARPS, GPU_KERNELS, GPU_KINDS, LOADER
from moe_tk.trace.model import Laps, RankTrace

HALF = 1 << 32
SLACK = 1 << 24  # a reading may be so much (ns) before the header's and is not taken for one 4.3 s later


def decode(headers: np.ndarray, records: np.ndarray, *, rank: int, call: dict[str, Any] | None = None) -> RankTrace:
    """headers [kernels, blocks, writers] and records [kernels, blocks, writers, kept], as StampBuffer.read() gives them."""
    kept, begun = records.shape[-1], headers["begin_ns"] > 0
    count = np.where(begun, np.minimum(headers["count"], kept), 0).astype(np.int64)
    place = np.argwhere(np.arange(kept) < count[..., None])
    kernel, block, writer = place[:, 0], place[:, 1], place[:, 2]
    rows, heads = records[tuple(place.T)], headers[kernel, block, writer]
    origin = int(headers["begin_ns"][begun].min()) if begun.any() else 0
    head_ns = (heads["begin_ns"] - np.uint64(origin)).astype(np.int64)
    begin, end = (head_ns + _after(rows[name], heads["begin_ns"].astype(np.uint32)) for name in ("begin_ns", "end_ns"))
    kind, detail = (rows["what"] >> 24).astype(np.int64), (rows["what"] & 0xffffff).astype(np.int64)
    if len(rows) and (kind.max() >= len(GPU_KINDS) or kind.min() == 0):
        raise MoETkError(f"trace of rank {rank}: records have kinds {int(kind.min())}..{int(kind.max())}, wanted "
                         f"1..{len(GPU_KINDS) - 1}: this memory was not written by the stamps of this version")
    writer = _role(kernel, writer, begun)
    laps = Laps(kernel, block, writer, kind, detail, begin.astype(np.float64), end.astype(np.float64))
    return RankTrace(rank=rank, backend="cuda", kernels=GPU_KERNELS, laps=laps, origin_ns=origin,
                     blocks_begun=_begun(headers, origin),
                     lost=int(headers["count"][begun].astype(np.int64).sum() - count.sum()),
                     clock=_clock(kernel, begin, end, head_ns, _after(rows["end_clock"], heads["begin_clock"])), call=call or {})


def _role(kernel: np.ndarray, warp: np.ndarray, begun: np.ndarray) -> np.ndarray:
    """Numbers of kinds.py for warps: tiles of 64 x 128 have one consumer warpgroup, and the other roles begin behind it."""
    one = begun[..., CONSUMER_WARPS].any(axis=1) & ~begun[..., LOADER:].any(axis=(1, 2))  # by kernel
    return np.where(one[kernel] & (warp >= CONSUMER_WARPS), warp + CONSUMER_WARPS, warp)


def _after(later: np.ndarray, earlier: np.ndarray) -> np.ndarray:
    """Difference of two 32-bit readings, which wrap; a little negative where `later` is a little earlier."""
    difference = (later.astype(np.int64) - earlier.astype(np.int64)) % HALF
    return np.where(difference >= HALF - SLACK, difference - HALF, difference)


def _begun(headers: np.ndarray, origin: int) -> np.ndarray:
    """[n, 3] kernel, block, ns since the origin when its first warp began."""
    begun = headers["begin_ns"] > 0
    blocks = np.argwhere(begun.any(axis=2))
    first = np.where(begun, headers["begin_ns"], np.iinfo(np.uint64).max).min(axis=2)[tuple(blocks.T)]
    return np.column_stack([blocks.astype(np.float64), (first - np.uint64(origin)).astype(np.float64)])


def _clock(kernel: np.ndarray, begin: np.ndarray, end: np.ndarray, head_ns: np.ndarray, cycles: np.ndarray) -> dict[str, float]:
    """The timer's period, and the mean rate of the multiprocessors in each kernel from their blocks' begins to their laps' ends."""
    found = {"timer_period_ns": float(np.gcd.reduce(np.concatenate([begin, end]))) if len(end) else 0.0}
    for index, name in enumerate(GPU_KERNELS):
        mine = kernel == index
        elapsed = (end - head_ns)[mine]
        if elapsed.sum() > 0:
            found[f"mhz_{name}"] = round(float(cycles[mine].sum() / elapsed.sum()) * 1e3, 1)
    return found
