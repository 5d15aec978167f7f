"""A made-up traced call: stamps as the kernels would write them, for tables of a real schedule, in a world of one rank."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from moe_tk.runtime.stamps import HEADER, KERNELS, RECORD, WRITERS
from moe_tk.schedule import build_tables, make_routing, task_order
from moe_tk.trace.kinds import BUILD_BLOCKS, CONSUMERS, GPU_KERNELS, LOADER, LOADERS, STORERS, kind_number
from moe_tk.trace.summary import GATHER, OPEN, OPEN_PHASES, SCATTER

TOKENS, TOP_K, EXPERTS, ROW_BLOCK, COLUMNS1, COLUMNS2 = 40, 2, 4, 64, 5, 6
BLOCKS, CAPACITY, GHZ = 18, 64, 1.75
BEGIN_NS = (7 << 32) - 30_000  # the low half of the timer wraps during the call
GROUPS = 4


@dataclass
class MadeUp:
    """Lists of (kind, detail, begin, end) in ns since the call's begin, by (kernel, block, writer)."""

    warpgroups: int = 2
    lanes: dict[tuple[int, int, int], list[tuple[int, int, int, int]]] = field(default_factory=dict)
    begun: dict[tuple[int, int, int], int] = field(default_factory=dict)

    def lap(self, kernel: int, block: int, writer: int, name: str, detail: int, begin: int, end: int) -> None:
        self.lanes.setdefault((kernel, block, writer), []).append((kind_number(name), detail, begin, end))

    def stamps(self) -> tuple[np.ndarray, np.ndarray]:
        """Headers and records as StampBuffer.read() gives them; what no lap fills is noise."""
        noise = np.random.default_rng(1)
        headers = np.zeros((KERNELS, BLOCKS, WRITERS), HEADER)
        records = noise.integers(0, 256, (KERNELS, BLOCKS, WRITERS, CAPACITY, RECORD.itemsize), dtype=np.uint8).view(RECORD)[..., 0]
        for place, begin in self.begun.items():
            laps = self.lanes.get(place, [])
            headers[place] = (BEGIN_NS + begin, int(begin * GHZ) % 2**32, len(laps))
            for index, (kind, detail, first, last) in enumerate(laps[:CAPACITY]):
                records[place][index] = ((BEGIN_NS + first) % 2**32, (BEGIN_NS + last) % 2**32, int(last * GHZ) % 2**32,
                                         kind << 24 | detail)
        return headers, records


def make_tables() -> dict[str, np.ndarray]:
    """Those that trace_checks reads, of one rank alone."""
    ids = make_routing("uniform", TOKENS, EXPERTS, TOP_K, seed=3).topk_ids
    tables = build_tables(ids, token_counts=[TOKENS], world=1, rank=0, num_experts=EXPERTS, mode="ep", row_block=ROW_BLOCK)
    tasks1, tasks2 = (task_order(tables, columns).numpy() for columns in (COLUMNS1, COLUMNS2))
    found = {"tasks1": tasks1, "tasks2": tasks2, "slots": tables.slots.numpy(), "job_order": tables.job_order.numpy()}
    counts = torch.tensor([len(tables.slot_pair), tables.num_blocks, tables.num_jobs, len(tasks1), len(tasks2)])
    return {**found, "counts": counts.numpy()}


def make_call(tables: dict[str, np.ndarray], warpgroups: int = 2, waited: int = 8_192) -> MadeUp:
    """A call in which everything happens in order: rows and tables, tiles of both GEMMs, jobs, own tokens. With one consumer
    warpgroup the numbers of all other warps are four less. waited: when the rows of other ranks were there."""
    call, warps = MadeUp(warpgroups), WRITERS - 4 * (2 - warpgroups)
    for kernel, at, writers in ((OPEN, 0, 1), (GATHER, 9_984, warps), (SCATTER, 59_968, warps)):
        call.begun |= {(kernel, block, writer): at for block in range(BLOCKS) for writer in range(writers)}
    for block in range(BUILD_BLOCKS):
        for step, kind in enumerate(OPEN_PHASES):
            call.lanes.setdefault((OPEN, block, 0), []).append((kind, 0, step * 1_536, (step + 1) * 1_536))
    for block in range(BUILD_BLOCKS, BLOCKS):
        call.lap(OPEN, block, 0, "zero counters", 0, 0, 1_024)
        call.lap(OPEN, block, 0, "export rows", 0, 1_024, 5_120)
    call.lap(OPEN, BLOCKS - 1, 0, "wait for rows", 0, 5_120, waited)  # the last one to have sent
    _tiles(call, GATHER, tables["tasks1"], 16_000)
    _tiles(call, SCATTER, tables["tasks2"], 64_000)
    for block in range(BLOCKS):
        for warp in range(warps):  # all of them, also one that has nothing else to do
            call.lanes.setdefault((GATHER, block, warp), []).insert(0, (kind_number("wait for launch"), 0, 9_984, 12_000))
    _batches(call, len(tables["job_order"]), "wait for jobs", "combine", 90_016)
    _batches(call, TOKENS, "wait for partial rows", "reduce", 100_000)
    return call


def _tiles(call: MadeUp, kernel: int, tasks: np.ndarray, first: int) -> None:
    clock = dict.fromkeys(range(BLOCKS), first)
    for number, (_, _, row_block, column) in enumerate(tasks.tolist()):
        block, tile = number % BLOCKS, row_block << 8 | column
        at = clock[block]
        clock[block] += 4_800
        for loader in LOADERS[GPU_KERNELS[kernel]]:
            begin = at
            if number < BLOCKS:
                call.lap(kernel, block, loader, "load weights", tile, at - 1_600, at - 640)
                if kernel == SCATTER:
                    call.lap(kernel, block, loader, "gate", tile, at - 640, at)
                else:
                    begin = at - 640
            call.lap(kernel, block, loader, "load", tile, begin, at + 3_200)
        for index, (consumer, storer) in enumerate(list(zip(CONSUMERS, STORERS, strict=True))[:call.warpgroups]):
            call.lap(kernel, block, consumer, "wait for inputs", tile, at, at + 320)
            if index == 1 and number % 3 == 0:
                call.lap(kernel, block, consumer, "skip", tile, at + 320, at + 3_840)
            else:
                call.lap(kernel, block, consumer, "multiply", tile, at + 320, at + 3_520)
                call.lap(kernel, block, consumer, "emit", tile, at + 3_520, at + 3_840)
                call.lap(kernel, block, storer, "wait for outputs", tile, at, at + 3_840)
                call.lap(kernel, block, storer, "store", tile, at + 3_840, at + 4_000)
            call.lap(kernel, block, storer, "push", tile, at + 4_000, at + 4_480)
    if call.warpgroups == 1:
        call.lanes = {(kernel, block, writer - 4 if writer >= LOADER else writer): laps
                      for (kernel, block, writer), laps in call.lanes.items()}


def _batches(call: MadeUp, entries: int, wait: str, work: str, first: int, batch: int = 4) -> None:
    items = [group << 20 | begin for group in range(GROUPS) for begin in range(0, entries, batch)]
    clock: dict[tuple[int, int], int] = {}
    for number, item in enumerate(items):
        lane = number % BLOCKS, number // BLOCKS % (WRITERS - 4 * (2 - call.warpgroups))
        at = clock.get(lane, first)
        clock[lane] = at + 960
        call.lap(SCATTER, *lane, wait, item, at, at + 320)
        call.lap(SCATTER, *lane, work, item, at + 320, at + 960)
