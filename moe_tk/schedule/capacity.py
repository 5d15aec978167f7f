"""Worst-case sizes of the tables for any routing, known before any routing is. Exact integers; no torch needed.

The schedule is dropless: duplicates in a row are allowed, so all k pairs of a token may be local to one rank, and
all pairs of all ranks may be. Tables hold int32 *indices*; offsets in elements or bytes are int64, see flat_offset.
"""

from __future__ import annotations

from typing import Any

from moe_tk.errors import ArgumentError, ScheduleError

INT32_MAX = 2**31 - 1
MAX_WORLD = 63  # `contributors` has one bit per rank in a non-negative int64


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def check_int32(what: str, value: int, remedy: str = "use fewer tokens per rank or fewer segments") -> int:
    """`value`, if it fits an int32 table. Raises ScheduleError with the value and the limit."""
    if value > INT32_MAX:
        raise ScheduleError(f"{what} = {value} does not fit the int32 tables (limit {INT32_MAX}): {remedy}")
    return value


def _check_sizes(world: int, tokens_per_rank: int, top_k: int, num_local_experts: int, segments: int,
                 row_block: int) -> None:
    least = {"world": (world, 1), "tokens_per_rank": (tokens_per_rank, 0), "top_k": (top_k, 1),
             "num_local_experts": (num_local_experts, 0), "segments": (segments, 1), "row_block": (row_block, 1)}
    for name, (value, low) in least.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < low:
            raise ArgumentError(f"{name} must be an integer >= {low}, got {value!r}")
    if world > MAX_WORLD:
        raise ArgumentError(f"world must be in 1..{MAX_WORLD}, got {world}")


def _max_blocks(pairs: int, groups: int, row_block: int) -> int:
    """Most row blocks that `pairs` rows can fill when spread over at most `groups` groups.

    Reached with one row in every group but one, and the rest in that one.
    """
    nonempty = min(pairs, groups)
    if nonempty == 0:
        return 0
    return nonempty - 1 + ceil_div(pairs - nonempty + 1, row_block)


def max_slots(world: int, tokens_per_rank: int, top_k: int, num_local_experts: int, segments: int,
              row_block: int) -> int:
    """Upper bound of the number of padded slots of one rank, over all routings (reached for segments = 1).

    Every pair of every rank may be local: world * tokens_per_rank * top_k rows in segments * num_local_experts
    groups, each group that has rows padded up to a multiple of row_block. Raises ScheduleError, at plan time, when
    pairs, groups or slots would not fit int32.
    """
    _check_sizes(world, tokens_per_rank, top_k, num_local_experts, segments, row_block)
    sizes = f"(world={world}, tokens_per_rank={tokens_per_rank}, top_k={top_k}, num_local_experts=" \
            f"{num_local_experts}, segments={segments}, row_block={row_block})"
    pairs = check_int32(f"max_slots: number of pairs {sizes}", world * tokens_per_rank * top_k)
    groups = check_int32(f"max_slots: number of groups {sizes}", segments * num_local_experts)
    return check_int32(f"max_slots: number of padded slots {sizes}", _max_blocks(pairs, groups, row_block) * row_block)


def max_segment_blocks(world: int, tokens_per_rank: int, top_k: int, num_local_experts: int, segments: int,
                       row_block: int) -> int:
    """Upper bound of the number of row blocks of one segment of one rank, over all routings.

    A segment holds at most ceil(tokens_per_rank / segments) tokens of each source rank. Raises like max_slots.
    """
    max_slots(world, tokens_per_rank, top_k, num_local_experts, segments, row_block)
    pairs = world * ceil_div(tokens_per_rank, segments) * top_k
    return _max_blocks(pairs, num_local_experts, row_block)


def flat_offset(index: Any, stride: int) -> Any:
    """Offset of the first element of row (or expert) `index` in a contiguous buffer of `stride` elements each.

    `index` is an int or an int32/int64 tensor taken from a table; the result is an int or an int64 tensor: the
    product passes 2**31 for shapes in daily use (8 x 16384 pooled tokens x 8 x 7168).
    """
    return index * stride if isinstance(index, int) else index.long() * stride
