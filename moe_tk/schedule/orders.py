"""The order in which output tiles are computed: for one grouped GEMM, and for both in one launch.

Vectorised like the tables (fixed shapes, no host synchronisation); golden loops are in golden.py. Given tables at
capacity length the orders have capacity length too, and the entries behind the last task are -1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_tk.errors import ArgumentError, ScheduleError
from moe_tk.schedule.capacity import check_int32
from moe_tk.schedule.tables import Tables

SUPERTILE = 8  # row blocks that share a column block of weights before the next one is loaded


def _check_columns(name: str, value: int) -> None:
    if not isinstance(value, int) or value < 1:
        raise ArgumentError(f"{name} must be an integer >= 1, got {value!r}")


def task_order(tables: Tables, num_col_blocks: int, passes: int = 1, per_step: int = 1) -> Tensor:
    """[n_tasks, 4] int32 rows (segment, local expert, row block, column block), in the order of execution.

    n_tasks = row blocks * num_col_blocks. Segment by segment, expert by expert; inside a group, supertiles of up to
    SUPERTILE row blocks are walked column by column, so that a weight column block is reused from L2; every second
    column upwards, so that neighbouring tasks always share their rows or their weights.
    With several passes each segment is walked once for each of `passes` equal runs of steps of `per_step` column blocks (the last
    step may have fewer): all rows are complete in the first columns early, at the price of reading the rows once for each pass.
    """
    _check_columns("num_col_blocks", num_col_blocks)
    _check_columns("passes", passes)
    _check_columns("per_step", per_step)
    num_blocks, device = tables.num_blocks, tables.device
    check_int32("task_order: number of tasks", num_blocks * num_col_blocks, "use larger tiles")
    block = torch.arange(num_blocks, device=device)
    group = tables.block_group.long()
    used = group >= 0
    first_block = tables.expert_offsets.long() // tables.row_block  # [groups + 1]
    start = torch.where(used, first_block[group.clamp(min=0)], block)
    end = torch.where(used, first_block[group.clamp(min=0) + 1], block + 1)
    tile_start = start + (block - start) // SUPERTILE * SUPERTILE
    height = (end - tile_start).clamp(max=SUPERTILE)
    col = torch.arange(num_col_blocks, device=device)
    down = (block - tile_start)[:, None].expand(-1, num_col_blocks)
    experts = max(tables.num_local_experts, 1)
    segment = group.clamp(min=0) // experts
    segment_start = torch.where(used, first_block[segment * experts], 0)
    segment_height = torch.where(used, first_block[(segment + 1) * experts], num_blocks) - segment_start
    steps = -(-num_col_blocks // per_step)
    cut = ((col // per_step + 1) * passes - 1) // steps  # the column's pass
    first_col = cut * steps // passes * per_step
    in_pass, width = col - first_col, ((cut + 1) * steps // passes * per_step).clamp(max=num_col_blocks) - first_col
    row = torch.where(in_pass % 2 == 0, down, height[:, None] - 1 - down)
    place = ((segment_start * num_col_blocks)[:, None] + segment_height[:, None] * first_col
             + (tile_start - segment_start)[:, None] * width + in_pass * height[:, None] + row)
    place = torch.where(used[:, None], place, (block * num_col_blocks)[:, None] + col)
    task = torch.stack(torch.broadcast_tensors((group // experts)[:, None], (group % experts)[:, None],
                                               block[:, None], col), dim=-1)
    return _ordered(task, place, used)


def mega_order(tables: Tables, l1_col_blocks: int, l2_col_blocks: int, warmup: int) -> Tensor:
    """[n, 4] int32 rows (phase, group, row block, column block); phase 0 is linear 1, phase 1 is linear 2.

    For row block b = 0, 1, ...: all linear-1 tasks of b, then all linear-2 tasks of b - warmup; after the last
    linear 1, the linear-2 tasks that remain. warmup counts row blocks; it must be >= 1: with 0 a linear-2 task
    would follow directly on the linear-1 tasks that it waits for.
    """
    _check_columns("l1_col_blocks", l1_col_blocks)
    _check_columns("l2_col_blocks", l2_col_blocks)
    if not isinstance(warmup, int) or warmup < 1:
        raise ScheduleError(f"mega_order: warmup is {warmup!r}, wanted an integer >= 1 (row blocks of linear 1 that "
                            "run ahead of linear 2)")
    per_block = l1_col_blocks + l2_col_blocks
    check_int32("mega_order: number of tasks", tables.num_blocks * per_block, "use larger tiles")
    device = tables.device
    block = torch.arange(tables.num_blocks, device=device)
    group = tables.block_group.long()
    used = group >= 0
    num_used = tables.expert_offsets[-1].long() // tables.row_block
    col1, col2 = torch.arange(l1_col_blocks, device=device), torch.arange(l2_col_blocks, device=device)
    before1 = block * l1_col_blocks + (block - warmup).clamp(min=0) * l2_col_blocks
    before2 = torch.minimum(block + warmup + 1, num_used) * l1_col_blocks + block * l2_col_blocks
    before1 = torch.where(used, before1, block * per_block)
    before2 = torch.where(used, before2, block * per_block + l1_col_blocks)
    place = torch.cat([before1[:, None] + col1, before2[:, None] + col2], dim=1)
    phase = torch.cat([torch.zeros_like(col1), torch.ones_like(col2)])
    task = torch.stack(torch.broadcast_tensors(phase, group[:, None], block[:, None], torch.cat([col1, col2])), dim=-1)
    return _ordered(task, place, used)


def _ordered(task: Tensor, place: Tensor, used: Tensor) -> Tensor:
    """task [blocks, n, 4] put at place [blocks, n] (a permutation); the tasks of unused blocks become -1."""
    task = torch.where(used[:, None, None], task, -1).reshape(-1, 4)
    return torch.empty_like(task).index_copy(0, place.reshape(-1), task).to(torch.int32)
