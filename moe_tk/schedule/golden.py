"""The tables and task orders as plain loops, for the eye. The other implementations must equal this one."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from moe_tk.schedule.capacity import ceil_div
from moe_tk.schedule.orders import SUPERTILE
from moe_tk.schedule.ownership import local_experts
from moe_tk.schedule.tables import Tables


def build_golden(topk_ids: list[list[int]], token_counts: Sequence[int], *, top_k: int, world: int, rank: int,
                 num_experts: int, mode: str, row_block: int, segments: int, job_chunk: int) -> Tables:
    """Tables of `rank` from the routing of all ranks, exact lengths, on the CPU. Arguments are build_tables's."""
    tokens = len(topk_ids) // world
    first, num_local = local_experts(num_experts, world, rank, mode)

    # 1. The pairs of each group, in the order (source rank, t, j).
    members: list[list[int]] = [[] for _ in range(segments * num_local)]
    for source in range(world):
        for t in range(token_counts[source]):
            segment = t * segments // token_counts[source]
            row = source * tokens + t
            for j, expert in enumerate(topk_ids[row]):
                if first <= expert < first + num_local:
                    members[segment * num_local + expert - first].append(row * top_k + j)

    # 2. Slots: group after group, each padded to whole row blocks.
    expert_offsets, slot_pair, block_group, block_target = [0], [], [], []
    for group, pairs in enumerate(members):
        for start in range(0, len(pairs), row_block):
            block = pairs[start : start + row_block]
            slot_pair += block + [-1] * (row_block - len(block))
            block_group.append(group)
            block_target.append(len(block))
        expert_offsets.append(len(slot_pair))
    slots = [[-1] * top_k for _ in topk_ids]
    for slot, pair in enumerate(slot_pair):
        if pair >= 0:
            slots[pair // top_k][pair % top_k] = slot

    # 3. Rows that have work here: moved by their smallest slot, ready by their largest.
    local = {row: [s for s in slots[row] if s >= 0] for row in range(len(slots)) if max(slots[row]) >= 0}
    delivery_order = sorted(local, key=lambda row: min(local[row]))
    job_order = sorted(local, key=lambda row: max(local[row]))
    expected = [0] * world
    chunk_expected = [[0] * max(1, ceil_div(tokens, job_chunk)) for _ in range(world)]
    for row in local:
        source, t = divmod(row, tokens)
        expected[source] += 1
        chunk_expected[source][t // job_chunk] += 1
    expert_load = [sum(len(members[s * num_local + e]) for s in range(segments)) for e in range(num_local)]

    # 4. The other side: what this rank sends.
    own = topk_ids[rank * tokens : (rank + 1) * tokens]
    wanted, contributors = _sends(own, token_counts[rank], world, num_experts, mode, segments)
    send_order = [sent + [-1] * (tokens - len(sent)) for sent in wanted]

    def i32(values: list, *shape: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32).reshape(shape or (len(values),))

    return Tables(
        world=world, rank=rank, tokens_per_rank=tokens, top_k=top_k, num_experts=num_experts,
        num_local_experts=num_local, first_expert=first, segments=segments, row_block=row_block, job_chunk=job_chunk,
        mode=mode, token_counts=i32(list(token_counts)), expert_offsets=i32(expert_offsets),
        slots=i32(slots, len(slots), top_k), slot_pair=i32(slot_pair), delivery_order=i32(delivery_order),
        block_target=i32(block_target), block_group=i32(block_group), job_order=i32(job_order),
        expected=i32(expected), chunk_expected=i32(chunk_expected, world, -1), expert_load=i32(expert_load),
        send_order=i32(send_order, world, tokens), send_count=i32([len(sent) for sent in wanted]),
        contributors=torch.tensor(contributors, dtype=torch.int64))


def _sends(own: list[list[int]], count: int, world: int, num_experts: int, mode: str,
           segments: int) -> tuple[list[list[int]], list[int]]:
    """For each destination the own tokens that it wants, in its order; and who answers for each own token."""
    send_order, contributors = [], [0] * len(own)
    for destination in range(world):
        first, num_there = local_experts(num_experts, world, destination, mode)
        wanted = []
        for t in range(count):
            there = [expert for expert in own[t] if first <= expert < first + num_there]
            if there:
                wanted.append((t * segments // count, min(there), t))
                contributors[t] |= 1 << destination
        send_order.append([t for _, _, t in sorted(wanted)])
    return send_order, contributors


def task_order_golden(tables: Tables, num_col_blocks: int, passes: int = 1, per_step: int = 1) -> torch.Tensor:
    """orders.task_order as loops."""
    tasks = []
    row_blocks = [offset // tables.row_block for offset in tables.expert_offsets.tolist()]
    experts, steps = tables.num_local_experts, -(-num_col_blocks // per_step)
    for segment in range(tables.segments if experts else 0):
        for cut in range(passes):
            cols = range(cut * steps // passes * per_step, min(num_col_blocks, (cut + 1) * steps // passes * per_step))
            for expert in range(experts):
                blocks = range(row_blocks[segment * experts + expert], row_blocks[segment * experts + expert + 1])
                for start in range(0, len(blocks), SUPERTILE):
                    for place, col in enumerate(cols):
                        rows = blocks[start : start + SUPERTILE]
                        tasks += [(segment, expert, block, col) for block in (rows if place % 2 == 0 else reversed(rows))]
    return torch.tensor(tasks, dtype=torch.int32).reshape(-1, 4)


def mega_order_golden(tables: Tables, l1_col_blocks: int, l2_col_blocks: int, warmup: int) -> torch.Tensor:
    """orders.mega_order as loops."""
    tasks = []
    group = tables.block_group.tolist()
    for step in range(len(group) + warmup):
        if step < len(group):
            tasks += [(0, group[step], step, col) for col in range(l1_col_blocks)]
        behind = step - warmup
        if 0 <= behind < len(group):
            tasks += [(1, group[behind], behind, col) for col in range(l2_col_blocks)]
    return torch.tensor(tasks, dtype=torch.int32).reshape(-1, 4)
