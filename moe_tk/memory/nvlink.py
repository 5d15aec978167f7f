"""Symmetric memory over NVLink: one segment of device memory per rank, mapped by all ranks of the group; and the workspace.

Segments come from torch.distributed._symmetric_memory (its own allocations, never the caching allocator's), without
multicast. Killed ranks' segments stay mapped, so a kernel that still stores there does not fault.
"""

from __future__ import annotations

from typing import Any

import torch

from moe_tk.errors import CapacityError, MoETkError, TopologyError
from moe_tk.group import RankGroup
from moe_tk.memory.layout import Item, end_of
from moe_tk.memory.nvlink_layout import JOB_CHUNK, NvlinkGeometry, row_items, slot_scales_offset, symmetric_items, table_items

Failure = tuple[str, str, str]  # kind, step, text


class NvlinkHeap:
    """Segments of all ranks of a group, each `size` bytes of device memory and zeroed. See memory.symmetric.SymmetricMemory."""

    def __init__(self, group: RankGroup, size: int, *, device: torch.device, tag: str, timeout_s: float) -> None:
        """A collective. `tag` and `size` must be equal on all ranks.

        Raises on all ranks if any rank fails: CapacityError (no memory), TopologyError (no peer access), MoETkError.
        """
        self.group, self.size, self.device = group, size, device
        self._views: list[torch.Tensor] = []
        self._handle: Any = None
        segment, failure = self._allocate(group, size, device)
        offer = {"size": size, "tag": tag, "failure": failure}
        offers = group.gather(offer, timeout_s=timeout_s, step="symmetric memory: exchange")
        self._raise_first([offer["failure"] for offer in offers])
        for rank, offer in enumerate(offers):
            if (offer["tag"], offer["size"]) != (offers[0]["tag"], offers[0]["size"]):
                raise MoETkError(f"symmetric memory: rank 0 set up {offers[0]['tag']} with {offers[0]['size']} bytes but rank "
                                 f"{rank} set up {offer['tag']} with {offer['size']} bytes: all ranks must create the same "
                                 "layers in the same order")
        failure = self._map(group, segment)
        self._raise_first(group.gather(failure, timeout_s=timeout_s, step="symmetric memory: confirm"))

    @staticmethod
    def _allocate(group: RankGroup, size: int, device: torch.device) -> tuple[torch.Tensor | None, Failure | None]:
        try:
            if group.world == 1:
                return torch.zeros(size, dtype=torch.uint8, device=device), None
            import torch.distributed._symmetric_memory as symmetric

            segment = symmetric.empty(size, dtype=torch.uint8, device=device)
            segment.zero_()
            torch.cuda.synchronize(device)
            return segment, None
        except (RuntimeError, ImportError) as error:
            kind = "capacity" if isinstance(error, torch.cuda.OutOfMemoryError) or "out of memory" in str(error) else "other"
            return None, (kind, "allocate", f"{size / 2**20:.1f} MiB on {device}: {str(error)[:2000]}")

    def _map(self, group: RankGroup, segment: Any) -> Failure | None:
        if group.world == 1:
            self._views = [segment]
            return None
        import torch.distributed._symmetric_memory as symmetric

        try:
            self._handle = symmetric.rendezvous(segment, group.process_group.group_name)
            if self._handle.rank != group.rank or self._handle.world_size != group.world:
                return "other", "map", f"torch numbers this rank {self._handle.rank} of {self._handle.world_size}"
            for rank in range(group.world):
                view = segment if rank == group.rank else self._handle.get_buffer(rank, (self.size,), torch.uint8)
                self._views.append(view)
        except RuntimeError as error:
            return "topology", "map", f"{self.device} cannot map its peers' memory (is there peer access?): {str(error)[:2000]}"
        return None

    @staticmethod
    def _raise_first(failures: list[Failure | None]) -> None:
        errors = {"capacity": CapacityError, "topology": TopologyError, "other": MoETkError}
        for rank, failure in enumerate(failures):
            if failure is not None:
                raise errors[failure[0]](f"symmetric memory: rank {rank} failed in step {failure[1]}: {failure[2]}")

    @property
    def bases(self) -> list[int]:
        """Address of every rank's segment here, in rank order."""
        return [view.data_ptr() for view in self._views]

    def tensor(self, owner: int, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A region of `owner`'s segment as a tensor."""
        count = torch.Size(shape).numel() * dtype.itemsize
        return self._views[owner][offset:offset + count].view(dtype).view(shape)

    def close(self) -> None:
        """Drops the mappings. Not a collective."""
        self._views.clear()
        self._handle = None


class NvlinkWorkspace:
    """Memory of one (group, geometry) on this rank. Creating one is a collective; see NvlinkHeap for what it raises."""

    def __init__(self, group: RankGroup, geometry: NvlinkGeometry, *, device: torch.device, generation: int,
                 timeout_s: float) -> None:
        self.group, self.geometry, self.device = group, geometry, device
        symmetric, tables, rows = self.items_of(geometry)
        self._symmetric = {item.name: item for item in symmetric}
        self.heap = NvlinkHeap(group, end_of(tuple(self._symmetric.values())), device=device, timeout_s=timeout_s,
                               tag=f"workspace {generation} of {geometry.shared_key()}")
        self._local: dict[str, tuple[torch.Tensor, Item]] = {}
        with group.local_step("workspace: local buffers", timeout_s=timeout_s):
            self._allocate_local(tables, rows)

    def _allocate_local(self, tables: tuple[Item, ...], rows: tuple[Item, ...]) -> None:
        """Raises CapacityError when the device has too little memory."""
        try:
            for items, make in ((tables, torch.zeros), (rows, torch.empty)):
                buffer = make(end_of(items), dtype=torch.uint8, device=self.device)
                self._local.update({item.name: (buffer, item) for item in items})
        except torch.cuda.OutOfMemoryError as error:
            size = end_of(tables) + end_of(rows)
            raise CapacityError(f"workspace: {size / 2**20:.1f} MiB of local buffers do not fit on {self.device}: use a smaller "
                                f"max_tokens_per_rank. {str(error)[:500]}") from error
        self.mailbox = torch.zeros(8, dtype=torch.int32, pin_memory=True, device="cpu")
        torch.cuda.synchronize(self.device)

    @staticmethod
    def items_of(geometry: NvlinkGeometry) -> tuple[tuple[Item, ...], tuple[Item, ...], tuple[Item, ...]]:
        """(symmetric regions, tables, rows) of a workspace."""
        return symmetric_items(geometry), table_items(geometry), row_items(geometry)

    @property
    def allocated_bytes(self) -> int:
        """Device memory of this workspace."""
        return self.heap.size + sum({buffer.data_ptr(): buffer.numel() for buffer, _ in self._local.values()}.values())

    def fields(self, num_sms: int) -> dict[str, Any]:
        """Fields of nvlink::workspace_view."""
        g = self.geometry
        local = {name: buffer.data_ptr() + item.offset for name, (buffer, item) in self._local.items()}
        shared = local.get("slot_rows", local.get("expert_out", 0))  # gathered rows, and their scales, then the experts' outputs
        local = {"expert_out": shared, "slot_rows": shared, "activated_scales": 0,
                 "slot_scales": shared + slot_scales_offset(g) if g.quantised and shared else 0, **local}
        return {**local, **{name: item.offset for name, item in self._symmetric.items()}, "bases": self.heap.bases,
                "mailbox": self.mailbox.data_ptr(), "rank": self.group.rank, "max_tokens": g.max_tokens, "top_k": g.top_k,
                "hidden": g.hidden, "row_bytes": g.row_bytes, "quantised": g.quantised, "job_chunk": JOB_CHUNK,
                "job_chunks": g.job_chunks, "num_experts": g.num_experts,
                "first_expert": g.first_expert, "num_local": g.num_local_experts, "tensor_parallel": g.mode == "tp",
                "max_slots": g.max_slots, "max_blocks": g.max_blocks, "intermediate": g.padded_intermediate, "num_sms": num_sms}

    def local(self, name: str, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        """A local table, counter or work buffer as a tensor."""
        return self.local_bytes(name).view(dtype).view(self._local[name][1].shape)

    def local_bytes(self, name: str) -> torch.Tensor:
        """The same as bytes."""
        buffer, item = self._local[name]
        return buffer[item.offset:item.offset + item.bytes]

    def region(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """A region of this rank's own segment as a tensor (last extent in elements of dtype)."""
        item = self._symmetric[name]
        return self.heap.tensor(self.group.rank, item.offset, (item.bytes // dtype.itemsize,), dtype)

    def poison(self) -> None:
        """Fills all rows with NaN: what the next call does not write itself must not matter (for tests)."""
        for item in self.items_of(self.geometry)[2]:
            self.local_bytes(item.name).fill_(0xff)  # NaN in every element type
        for name in ("rows", "planes"):
            self.region(name, torch.uint8).fill_(0xff)

    def close(self) -> None:
        """Gives the heap's mappings up. Not a collective."""
        self.heap.close()
