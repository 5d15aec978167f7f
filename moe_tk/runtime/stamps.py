"""Memory of the stamps of one traced session, and the comparison of its GPUs' clocks. docs/trace.md."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import torch

from moe_tk.group import RankGroup
from moe_tk.memory.nvlink import NvlinkHeap

KERNELS, WRITERS = 3, 12  # stamps.cuh STAMP_KERNELS, STAMP_WRITERS
CAPACITY = 1024           # laps of one writer; those beyond it are counted and lost
CLOCK_ROUNDS = 300
CLOCK_BYTES = 4096        # clock_sync.cuh clock_words
HEADER = np.dtype([("begin_ns", "<u8"), ("begin_clock", "<u4"), ("count", "<u4")])
RECORD = np.dtype([("begin_ns", "<u4"), ("end_ns", "<u4"), ("end_clock", "<u4"), ("what", "<u4")])


class StampBuffer:
    """Device memory that the kernels of a traced session write their laps to. Making one is a collective of the group."""

    def __init__(self, group: RankGroup, module: ModuleType, *, device: torch.device, num_sms: int, timeout_s: float,
                 capacity: int = CAPACITY) -> None:
        self.group, self.module, self.device = group, module, device
        self.blocks, self.capacity = num_sms, capacity
        writers = KERNELS * num_sms * WRITERS
        self._headers = torch.zeros(writers, HEADER.itemsize, dtype=torch.uint8, device=device)
        self._records = torch.empty(writers, capacity, RECORD.itemsize, dtype=torch.uint8, device=device)
        self._clock = None
        if group.world > 1:
            self._clock = NvlinkHeap(group, CLOCK_BYTES, device=device, tag="clocks of a trace", timeout_s=timeout_s)
        self._round = 1

    @property
    def allocated_bytes(self) -> int:
        """Device memory, beyond that of the workspace."""
        return self._headers.numel() + self._records.numel() + (self._clock.size if self._clock else 0)

    def fields(self) -> dict[str, int]:
        """Further fields of nvlink::workspace_view."""
        return {"stamp_headers": self._headers.data_ptr(), "stamp_records": self._records.data_ptr(), "stamp_blocks": self.blocks,
                "stamp_capacity": self.capacity}

    def read(self) -> tuple[np.ndarray, np.ndarray]:
        """Of the last call: headers [kernels, blocks, writers] and records [.., most laps of any writer]. Waits for the device."""
        torch.cuda.synchronize(self.device)
        headers = self._headers.cpu().numpy().view(HEADER).reshape(KERNELS, self.blocks, WRITERS)
        most = min(self.capacity, max(1, int(headers["count"].max())))
        kept = self._records[:, :most].contiguous().cpu().numpy()
        return headers, kept.view(RECORD).reshape(KERNELS, self.blocks, WRITERS, most)

    def compare_clocks(self, *, timeout_s: float) -> dict[int, np.ndarray]:
        """On rank 0: by other rank, [rounds, 3] uint64 ns: own clock before and after a round, the other's between. Elsewhere
        empty. A collective; every wait is bounded by a second."""
        found: dict[int, np.ndarray] = {}
        if self._clock is None:
            return found
        rank, stream = self.group.rank, torch.cuda.current_stream(self.device).cuda_stream
        samples = torch.zeros(CLOCK_ROUNDS, 3, dtype=torch.int64, device=self.device)
        for peer in range(1, self.group.world):
            torch.cuda.synchronize(self.device)
            self.group.gather(None, timeout_s=timeout_s, step="trace: compare clocks")
            if rank in (0, peer):
                other = peer if rank == 0 else 0
                self.module.clock_sync(self._clock.bases[rank], self._clock.bases[other], asks=rank == 0, first_round=self._round,
                                       rounds=CLOCK_ROUNDS, samples=samples.data_ptr(), stream=stream)
                torch.cuda.synchronize(self.device)
            self._round += CLOCK_ROUNDS
            if rank == 0:
                found[peer] = samples.cpu().numpy().view(np.uint64).copy()
        return found


def stamp_sizes(module: ModuleType) -> tuple[Any, ...]:
    """What a traced module says of its stamps, to be compared with this file and moe_tk.trace.kinds."""
    return module.STAMP_KERNELS, module.STAMP_WRITERS, module.STAMP_KINDS
