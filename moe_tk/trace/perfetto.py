"""A trace as Chrome trace events, which ui.perfetto.dev and chrome://tracing open: a process per rank, a thread per kernel,
block and writer."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from moe_tk.trace.kinds import CPU_KINDS, GPU_KINDS, WRITERS, Kind, details_of, lane_name
from moe_tk.trace.model import Laps, RankTrace, Trace

BLOCKS = 4096  # thread numbers are (kernel * BLOCKS + block) * WRITERS + writer


def kinds_of(backend: str) -> tuple[Kind, ...]:
    return GPU_KINDS if backend == "cuda" else CPU_KINDS


def shown_blocks(rank: RankTrace, most: int | None) -> set[int]:
    """`most` blocks of a rank, evenly from all; None: all."""
    blocks = np.unique(rank.laps.block)
    if most is None or most >= len(blocks):
        return set(blocks.tolist())
    return {int(blocks[i * len(blocks) // most]) for i in range(most)}


def events(trace: Trace, blocks: int | None = None) -> Iterator[dict[str, Any]]:
    """The trace events; times in us since the first block of any rank began."""
    begin = trace.begin_ns
    for rank in trace.ranks:
        chosen = shown_blocks(rank, blocks)
        yield {"ph": "M", "name": "process_name", "pid": rank.rank, "tid": 0, "args": {"name": f"rank {rank.rank}"}}
        yield from _names(rank, chosen)
        yield from _laps(rank, rank.laps.where(np.isin(rank.laps.block, list(chosen))), trace.shift(rank) - begin)


def _laps(rank: RankTrace, laps: Laps, shift: float) -> Iterator[dict[str, Any]]:
    kinds = kinds_of(rank.backend)
    columns = (_thread(laps.kernel, laps.block, laps.writer), laps.kind, laps.detail, laps.begin + shift, laps.end - laps.begin)
    for thread, number, detail, begin_ns, took_ns in zip(*(column.tolist() for column in columns), strict=True):
        kind = kinds[number]
        yield {"ph": "X", "name": kind.name, "cat": kind.state, "pid": rank.rank, "tid": thread, "ts": round(begin_ns / 1e3, 3),
               "dur": round(took_ns / 1e3, 3), "args": details_of(kind, detail)}


def _thread(kernel: Any, block: Any, writer: Any) -> Any:
    return (kernel * BLOCKS + block) * WRITERS + writer


def _names(rank: RankTrace, chosen: set[int]) -> Iterator[dict[str, Any]]:
    lanes = np.unique(np.column_stack([rank.laps.kernel, rank.laps.block, rank.laps.writer]), axis=0)
    for kernel, block, writer in lanes.tolist():
        if block not in chosen:
            continue
        name = rank.kernels[kernel]
        lane = lane_name(name, block, writer) if rank.backend == "cuda" else ""
        thread = {"pid": rank.rank, "tid": _thread(kernel, block, writer)}
        yield {"ph": "M", "name": "thread_name", **thread, "args": {"name": f"{name} {block:03} {lane}".rstrip()}}
        yield {"ph": "M", "name": "thread_sort_index", **thread, "args": {"sort_index": thread["tid"]}}


def write(trace: Trace, path: Path, blocks: int | None = None) -> None:
    """Writes the trace, compressed where `path` ends in .gz. Raises OSError."""
    head = {"displayTimeUnit": "ns", "otherData": {key: str(value) for key, value in trace.call.items()}}
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "wt", encoding="utf-8") as out:
        out.write(json.dumps(head)[:-1] + ', "traceEvents": [\n')
        for number, event in enumerate(events(trace, blocks)):
            out.write((",\n" if number else "") + json.dumps(event, separators=(",", ":")))
        out.write("\n]}\n")
