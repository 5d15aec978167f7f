"""A workspace: the symmetric heap, the counters and the work buffers of one (group, geometry)."""

from __future__ import annotations

import torch

from moe_tk.errors import CapacityError
from moe_tk.group import RankGroup
from moe_tk.memory.geometry import Geometry
from moe_tk.memory.layout import Item, counter_items, end_of, local_items, symmetric_items
from moe_tk.memory.shm import ShmHeap

TORCH_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def _buffer(size: int, geometry: Geometry) -> torch.Tensor:
    """`size` bytes on the CPU, whatever default device the caller has set."""
    try:
        return torch.empty(size, dtype=torch.uint8, device="cpu")
    except RuntimeError as error:
        raise CapacityError(f"{size / 2**20:.1f} MiB of local buffers for max_tokens_per_rank={geometry.max_tokens} cannot be had: "
                            "lower max_tokens_per_rank or use more segments") from error


class Workspace:
    """Memory of one (group, geometry) on this rank. Creating one is a collective; see ShmHeap for what it raises."""

    def __init__(self, group: RankGroup, geometry: Geometry, *, generation: int, timeout_s: float) -> None:
        self.group, self.geometry = group, geometry
        self._symmetric = {item.name: item for item in symmetric_items(geometry)}
        self._counters = {item.name: item for item in counter_items(geometry)}
        self._local = {item.name: item for item in local_items(geometry)}
        with group.local_step("workspace: local buffers", timeout_s=timeout_s):
            self._counter_bytes = _buffer(end_of(tuple(self._counters.values())), geometry).zero_()
            self._local_bytes = _buffer(end_of(tuple(self._local.values())), geometry)
        size = end_of(tuple(self._symmetric.values()))
        self.heap = ShmHeap(group, size, tag=f"workspace {generation} of {geometry.shared_key()}", timeout_s=timeout_s)

    @property
    def allocated_bytes(self) -> int:
        return self.heap.size + self._counter_bytes.numel() + self._local_bytes.numel()

    def heap_fields(self) -> dict:
        """Fields of protocol::symmetric_heap."""
        g = self.geometry
        return {"bases": self.heap.bases, "rank": self.group.rank, "max_tokens": g.max_tokens, "send_chunks": g.send_chunks,
                "job_chunks": g.job_chunks, **{name: item.offset for name, item in self._symmetric.items()}}

    def counter_fields(self) -> dict[str, int]:
        """Fields of patterns::local_counters, as addresses."""
        base = self._counter_bytes.data_ptr()
        return {name: base + item.offset for name, item in self._counters.items() if name != "epoch"}

    @property
    def epoch_address(self) -> int:
        return self._counter_bytes.data_ptr() + self._counters["epoch"].offset

    def region(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """A region of this rank's own heap as a tensor of its full shape."""
        item = self._symmetric[name]
        return self.heap.tensor(self.group.rank, item.offset, item.shape, dtype)

    def local(self, name: str) -> torch.Tensor:
        """A work buffer of this rank as a tensor."""
        item: Item = self._local[name]
        dtype = TORCH_DTYPES[self.geometry.dtype]
        return self._local_bytes[item.offset:item.offset + item.bytes].view(dtype).view(item.shape)

    def poison(self) -> None:
        """Fills all work buffers with NaN: what the next call does not write itself must not matter (for tests)."""
        for name in self._local:
            self.local(name).fill_(float("nan"))

    def close(self) -> None:
        """Gives the heap's mappings up. Not a collective; peers keep their own."""
        self.heap.close()
