"""Sizes of the ops that both back ends and the fake kernels must agree on."""

from __future__ import annotations

from moe_tk.errors import ArgumentError
from moe_tk.memory.nvlink_layout import ROW_BLOCKS
from moe_tk.planner.fusion import LARGE_TILE_ROWS
from moe_tk.planner.plan import ROW_BLOCK
from moe_tk.schedule import local_experts

WEIGHT_POSITIONS = ("before_l2", "combine")


def check_divides(rows: int, world: int) -> None:
    """Raises ArgumentError when the rows of gemm_rs cannot be dealt out to the ranks."""
    if rows % world:
        below = rows // world * world
        raise ArgumentError(f"x has {rows} rows, wanted a multiple of world={world}; the nearest valid numbers are {below} and "
                            f"{below + world}")


def routed_rows(*, world: int, rank: int, tokens_per_rank: int, top_k: int, num_experts: int, mode: str, row_block: int) -> int:
    """Rows of the slot-ordered buffers of dispatch_gemm and gemm_combine, enough for any routing: all pairs may be here, and
    each local expert may leave one row block part empty. Also right for symbolic sizes (fake kernels)."""
    _, local = local_experts(num_experts, world, rank, mode)
    return (-(-(world * tokens_per_rank * top_k) // row_block) + local) * row_block


def routed_row_block(on_cuda: bool, *, world: int, tokens_per_rank: int, top_k: int, num_experts: int) -> int:
    """Slots of a row block of the routed ops, from what all ranks know: larger ones pay where experts have many rows."""
    if not on_cuda:
        return ROW_BLOCK
    small, large = ROW_BLOCKS
    return large if world * tokens_per_rank * top_k >= LARGE_TILE_ROWS * num_experts else small
