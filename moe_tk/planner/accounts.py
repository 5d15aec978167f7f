"""The two accounts that precede any fusion (docs/architecture.md)."""

from __future__ import annotations

MIN_CEILING = 1.05  # below it, perfect overlap would gain less than the fused kernel may cost
MIN_WAVES = 1.0     # below it, every tile is in flight at once and nothing is left to overlap with


def ceiling(compute_s: float, communicate_s: float) -> float:
    """Largest speed-up that perfect overlap can give: (compute + communicate) / max of both; 1.0 if both are 0."""
    longest = max(compute_s, communicate_s)
    return (compute_s + communicate_s) / longest if longest > 0 else 1.0


def waves(num_tasks: int, resident_blocks: int) -> float:
    """How many rounds the resident blocks need for all tasks."""
    return num_tasks / max(resident_blocks, 1)


def overlap(compute_s: float, communicate_s: float, fused_s: float) -> float:
    """Share of the shorter of the two that the fused run hid: (T_comp + T_comm - T_fused) / min(T_comp, T_comm)."""
    shorter = min(compute_s, communicate_s)
    return (compute_s + communicate_s - fused_s) / shorter if shorter > 0 else 0.0
