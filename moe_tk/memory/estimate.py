"""How much memory a layer takes, before it takes it."""

from __future__ import annotations

from dataclasses import dataclass

from moe_tk.errors import ArgumentError
from moe_tk.memory.geometry import Geometry
from moe_tk.memory.layout import Item, counter_items, end_of, local_items, symmetric_items
from moe_tk.planner.plan import JOB_CHUNK, ROW_BLOCK, choose_pattern, default_segments
from moe_tk.schedule import local_experts, shard_range
from moe_tk.sizes import check_layer_sizes


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of one rank, itemised. `total` is what is allocated, alignment included; weights are not in it."""

    symmetric: tuple[Item, ...]
    counters: tuple[Item, ...]
    local: tuple[Item, ...]

    @property
    def symmetric_bytes(self) -> int:
        return end_of(self.symmetric)

    @property
    def local_bytes(self) -> int:
        return end_of(self.counters) + end_of(self.local)

    @property
    def total(self) -> int:
        return self.symmetric_bytes + self.local_bytes

    def __str__(self) -> str:
        lines = [f"{'bytes':>16}  {'where':<9} item"]
        for where, items in (("symmetric", self.symmetric), ("local", self.counters), ("local", self.local)):
            lines += [f"{i.bytes:>16,}  {where:<9} {i.name} {list(i.shape)}: {i.meaning}" for i in items if i.bytes]
        lines.append(f"{self.total:>16,}  total (symmetric {self.symmetric_bytes:,}, local {self.local_bytes:,})")
        return "\n".join(lines)


def estimate(geometry: Geometry) -> MemoryEstimate:
    """The estimate of one geometry."""
    return MemoryEstimate(symmetric_items(geometry), counter_items(geometry), local_items(geometry))


def layer_geometry(*, world: int, rank: int, num_experts: int, top_k: int, hidden_size: int, intermediate_size: int,
                   max_tokens_per_rank: int, mode: str, dtype: str, pattern: str, row_block: int, segments: int,
                   job_chunk: int) -> Geometry:
    """Geometry of a MoE layer's workspace on `rank`. mega keeps a ring of two segments, two_kernel all row blocks."""
    _, local = local_experts(num_experts, world, rank, mode)
    inter = intermediate_size if mode == "ep" else shard_range(intermediate_size, world, rank)[1]
    return Geometry(world=world, max_tokens=max_tokens_per_rank, top_k=top_k, num_experts=num_experts, num_local_experts=local,
                    hidden=hidden_size, intermediate=inter, out_width=hidden_size, dtype=dtype, mode=mode, row_block=row_block,
                    segments=segments, ring_segments=2 if pattern == "mega" and segments > 2 else 0, job_chunk=job_chunk,
                    send_chunk=job_chunk)


def estimate_memory(*, world: int, rank: int = 0, num_experts: int, top_k: int, hidden_size: int, intermediate_size: int,
                    max_tokens_per_rank: int, mode: str = "ep", dtype: str = "bfloat16", pattern: str = "auto",
                    row_block: int = ROW_BLOCK, segments: int | None = None, job_chunk: int = JOB_CHUNK,
                    protocol: str = "shm") -> MemoryEstimate:
    """Memory of a layer's workspace on one rank, in bytes, itemised: equal to what MoELayer allocates.

    The workspace is shared by all layers of one (group, geometry); weights come on top. Defaults are those of
    MoELayer on the CPU back end (segments: what its plan chooses for max_tokens_per_rank). protocol="nvlink" is the CUDA back end,
    where dtype may also be "float8_e4m3fn", segments are 1 if not said, and pattern, row_block and job_chunk change nothing.
    Raises ArgumentError for sizes that cannot be.
    """
    check_layer_sizes(world=world, rank=rank, num_experts=num_experts, top_k=top_k, hidden_size=hidden_size,
                      intermediate_size=intermediate_size, max_tokens_per_rank=max_tokens_per_rank, mode=mode)
    dtype = str(dtype).removeprefix("torch.")
    if protocol == "nvlink":
        from moe_tk.memory.nvlink_layout import NvlinkGeometry, nvlink_estimate  # it needs this module

        return nvlink_estimate(NvlinkGeometry(world=world, rank=rank, max_tokens=max_tokens_per_rank, top_k=top_k,
                                              num_experts=num_experts, hidden=hidden_size, intermediate_size=intermediate_size,
                                              mode=mode, max_segments=segments or 1, dtype=dtype))
    if protocol != "shm":
        raise ArgumentError(f"protocol is {protocol!r}, wanted 'shm' or 'nvlink': others have no memory of their own")
    pattern = choose_pattern(pattern, [])
    if segments is None:
        segments = default_segments(max_tokens_per_rank)
    return estimate(layer_geometry(world=world, rank=rank, num_experts=num_experts, top_k=top_k, hidden_size=hidden_size,
                                   intermediate_size=intermediate_size, max_tokens_per_rank=max_tokens_per_rank, mode=mode,
                                   dtype=dtype, pattern=pattern, row_block=row_block, segments=segments,
                                   job_chunk=job_chunk))
