"""Who owns what: experts over ranks (EP) and intermediate columns over ranks (TP). No torch needed."""

from __future__ import annotations

from moe_tk.errors import ArgumentError

MODES = ("ep", "tp")


def _split(total: int, parts: int, index: int) -> tuple[int, int]:
    """(first, count) of part `index` of range(total): contiguous, counts differ by at most one, larger ones first."""
    base, extra = divmod(total, parts)
    return index * base + min(index, extra), base + (index < extra)


def _check(what: str, total: int, world: int, rank: int) -> None:
    if total < 1:
        raise ArgumentError(f"{what} must be an integer >= 1, got {total}")
    if world < 1:
        raise ArgumentError(f"world must be an integer >= 1, got {world}")
    if not 0 <= rank < world:
        raise ArgumentError(f"rank must be in 0..{world - 1} for world={world}, got {rank}")


def expert_range(num_experts: int, world: int, rank: int) -> tuple[int, int]:
    """(first, count) of the global experts that `rank` owns in EP.

    30 experts on 8 ranks: counts 4, 4, 4, 4, 4, 4, 3, 3. With fewer experts than ranks the last ranks own none.
    """
    _check("num_experts", num_experts, world, rank)
    return _split(num_experts, world, rank)


def shard_range(intermediate: int, world: int, rank: int) -> tuple[int, int]:
    """(first, count) of the intermediate columns of every expert that `rank` owns in TP, split like experts in EP."""
    _check("intermediate", intermediate, world, rank)
    return _split(intermediate, world, rank)


def local_experts(num_experts: int, world: int, rank: int, mode: str) -> tuple[int, int]:
    """(first, count) of the experts that `rank` computes: its share in "ep", all of them in "tp"."""
    if mode not in MODES:
        raise ArgumentError(f"mode must be one of {', '.join(MODES)}, got {mode!r}")
    if mode == "ep":
        return expert_range(num_experts, world, rank)
    _check("num_experts", num_experts, world, rank)
    return 0, num_experts
