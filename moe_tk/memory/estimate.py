"""How much memory a layer takes, before it takes it."""

from __future__ import annotations

from moe_tk.errors import ArgumentError
from moe_tk.memory.geometry import Geometry
from moe_tk.memory.layout import MemoryEstimate, counter_items, local_items, symmetric_items
from moe_tk.memory.nvlink_layout import NvlinkGeometry, nvlink_estimate
from moe_tk.planner.plan import JOB_CHUNK, ROW_BLOCK, choose_pattern, default_segments
from moe_tk.schedule import local_experts, shard_range
from moe_tk.sizes import check_layer_sizes


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
