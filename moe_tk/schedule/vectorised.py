"""The tables in torch: fixed shapes, no host synchronisation, linear in the number of pairs. CPU and CUDA.

Every array has its worst-case length (capacity.py), so a CUDA graph can capture the build; entries behind the last
one that counts are -1. Where an index means "nowhere" it points one past the end, at an entry that is cut off.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_tk.schedule.capacity import ceil_div, max_slots
from moe_tk.schedule.ownership import local_experts
from moe_tk.schedule.tables import Tables


@dataclass(frozen=True, slots=True, eq=False)
class PaddedTables:
    """Tables at capacity length, and how much of each counts (int32 scalars on the same device)."""

    tables: Tables
    num_slots: Tensor   # [] slots in slot_pair
    num_blocks: Tensor  # [] row blocks in block_group and block_target
    num_jobs: Tensor    # [] rows in delivery_order and job_order


def build_padded(topk_ids: Tensor, token_counts: Tensor, *, world: int, rank: int, num_experts: int, mode: str,
                 row_block: int, segments: int = 1, job_chunk: int = 32) -> PaddedTables:
    """Tables of `rank` from the routing of all ranks; arguments as in build_tables, unchecked beyond their shapes.

    topk_ids [world * T, k] int32 or int64; token_counts [world] int32 or int64, on the device of topk_ids.
    """
    rows, top_k = topk_ids.shape
    tokens = rows // world
    first, num_local = local_experts(num_experts, world, rank, mode)
    capacity = max_slots(world, tokens, top_k, num_local, segments, row_block)
    ids, counts = topk_ids.long(), token_counts.long()
    t_idx = torch.arange(tokens, device=ids.device)
    present = t_idx < counts[:, None]                                            # [R, T]
    segment = t_idx * segments // counts.clamp(min=1)[:, None]                   # [R, T]

    local = (ids >= first) & (ids < first + num_local) & present.reshape(rows, 1)
    group = segment.reshape(rows, 1) * num_local + (ids - first)
    group = torch.where(local, group, segments * num_local)                      # [R * T, k]
    group_count, offsets, slots = _place(group, segments * num_local, row_block, capacity)

    pair = torch.arange(rows * top_k, device=ids.device)
    slot_pair = torch.full((capacity + 1,), -1, device=ids.device).scatter(0, slots.reshape(-1), pair)[:capacity]
    block_start = torch.arange(0, capacity, row_block, device=ids.device)
    block_used = block_start < offsets[-1]
    block_group = torch.searchsorted(offsets[1:], block_start, right=True)       # skips groups without slots
    block_target = (slot_pair >= 0).reshape(-1, row_block).sum(1)

    is_local = slots < capacity
    smallest = slots.amin(1)                                                     # capacity: no work here
    largest = torch.where(is_local, slots, -1).amax(1)
    has_work = smallest < capacity
    jobs = has_work.reshape(world, tokens)
    num_chunks = max(1, ceil_div(tokens, job_chunk))
    chunks = F.pad(jobs, (0, num_chunks * job_chunk - tokens)).reshape(world, num_chunks, job_chunk)

    own = slice(rank * tokens, (rank + 1) * tokens)
    send_order, send_count, contributors = _send(ids[own], present[rank], segment[rank], world, num_experts, mode)
    i32 = torch.int32
    tables = Tables(
        world=world, rank=rank, tokens_per_rank=tokens, top_k=top_k, num_experts=num_experts,
        num_local_experts=num_local, first_expert=first, segments=segments, row_block=row_block, job_chunk=job_chunk,
        mode=mode, token_counts=token_counts.to(i32), expert_offsets=offsets.to(i32),
        slots=torch.where(is_local, slots, -1).to(i32), slot_pair=slot_pair.to(i32),
        delivery_order=_sorted_rows(smallest, capacity).to(i32), block_target=block_target.to(i32),
        block_group=torch.where(block_used, block_group, -1).to(i32),
        job_order=_sorted_rows(torch.where(has_work, largest, capacity), capacity).to(i32),
        expected=jobs.sum(1).to(i32), chunk_expected=chunks.sum(2).to(i32),
        expert_load=group_count.reshape(segments, num_local).sum(0).to(i32), send_order=send_order.to(i32),
        send_count=send_count.to(i32), contributors=contributors)
    return PaddedTables(tables, num_slots=tables.expert_offsets[-1], num_blocks=block_used.sum().to(i32),
                        num_jobs=has_work.sum().to(i32))


def _place(group: Tensor, num_groups: int, row_block: int, capacity: int) -> tuple[Tensor, Tensor, Tensor]:
    """Slots in the order (group, pair). group [rows, k] in [0, num_groups], the last meaning "not here".

    Returns rows per group [num_groups], padded offsets [num_groups + 1], slots like group (capacity: not here).
    """
    flat = group.reshape(-1)
    count = torch.zeros(num_groups + 1, dtype=torch.int64, device=flat.device)
    count = count.scatter_add(0, flat, torch.ones_like(flat))
    padded = (count[:-1] + row_block - 1) // row_block * row_block
    offsets = F.pad(padded.cumsum(0), (1, 0))
    in_order, order = flat.sort(stable=True)
    place_in_group = torch.arange(flat.shape[0], device=flat.device) - (count.cumsum(0) - count)[in_order]
    slot = torch.where(in_order < num_groups, offsets[in_order] + place_in_group, capacity)
    slots = torch.empty_like(flat).scatter(0, order, slot)
    return count[:-1], offsets, slots.reshape(group.shape)


def _sorted_rows(key: Tensor, capacity: int) -> Tensor:
    """Rows with key < capacity in ascending order of their keys (all different), then -1. Linear: no sort."""
    num_rows = key.shape[0]
    taken = torch.zeros(capacity + 1, dtype=torch.int64, device=key.device).scatter(0, key, 1)
    place = torch.where(key < capacity, (taken.cumsum(0) - 1)[key], num_rows)
    rows = torch.arange(num_rows, device=key.device)
    return torch.full((num_rows + 1,), -1, device=key.device).scatter(0, place, rows)[:num_rows]


def _owner(ids: Tensor, world: int, num_experts: int) -> Tensor:
    """Rank that owns each expert in EP (ownership.expert_range as arithmetic: no host data); ids in [0, E)."""
    base, extra = divmod(num_experts, world)
    large = extra * (base + 1)  # experts of the ranks that own base + 1
    return torch.where(ids < large, ids // (base + 1), extra + (ids - large) // max(base, 1))


def _send(own_ids: Tensor, present: Tensor, segment: Tensor, world: int, num_experts: int,
          mode: str) -> tuple[Tensor, Tensor, Tensor]:
    """What this rank sends: send_order [R, T], send_count [R], contributors [T].

    A destination sorts by (segment, expert, source, t, j), so among the tokens of one source its smallest slots
    are ordered by (segment, smallest expert of the token there, t).
    """
    tokens = own_ids.shape[0]
    valid = (own_ids >= 0) & (own_ids < num_experts) & present[:, None]
    ids = torch.where(valid, own_ids, num_experts)
    if mode == "tp":
        smallest = ids.amin(1, keepdim=True).expand(tokens, world)
    else:
        owner = torch.where(valid, _owner(ids, world, num_experts), world)
        smallest = torch.full((tokens, world + 1), num_experts, dtype=torch.int64, device=ids.device)
        smallest = smallest.scatter_reduce(1, owner, ids, "amin")[:, :world]
    wanted = smallest < num_experts                                              # [T, R]
    never = torch.iinfo(torch.int64).max
    key = torch.where(wanted, segment[:, None] * num_experts + smallest, never)
    order = key.t().sort(dim=1, stable=True).indices
    count = wanted.sum(0)
    in_count = torch.arange(tokens, device=ids.device) < count[:, None]
    contributors = (wanted.long() << torch.arange(world, device=ids.device)).sum(1)
    return torch.where(in_count, order, -1), count, contributors
