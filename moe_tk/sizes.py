"""Checks of numbers that a caller passes: one sentence each, naming argument, value and the nearest valid value. No torch."""

from __future__ import annotations

import math
from typing import Any

from moe_tk.errors import ArgumentError, ArgumentTypeError

ALIGNMENT = 8   # elements of a row: 16 bytes in bfloat16, the unit of a bulk copy
MAX_TOP_K = 64
MODES = ("ep", "tp")


def check_count(name: str, value: Any, *, least: int = 1, most: int | None = None) -> int:
    """`value`, if it is an integer in least..most."""
    span = f"{least}..{most}" if most is not None else f">= {least}"
    if isinstance(value, bool) or not isinstance(value, int):
        raise ArgumentTypeError(f"{name} is {value!r} ({type(value).__name__}), wanted an integer {span}")
    if value < least or (most is not None and value > most):
        near = least if value < least else most
        raise ArgumentError(f"{name} is {value}, wanted an integer {span}; the nearest valid value is {near}")
    return value


def check_width(name: str, value: Any) -> int:
    """`value`, if rows of that many elements can be moved: a positive multiple of ALIGNMENT."""
    return check_multiple(name, value, ALIGNMENT, "rows are moved in units of 16 bytes")


def check_multiple(name: str, value: Any, step: int, why: str) -> int:
    """`value`, if it is a positive multiple of `step`."""
    check_count(name, value)
    if value % step:
        below, above = value // step * step, -(-value // step) * step
        near = f"values are {below} and {above}" if below else f"value is {above}"
        raise ArgumentError(f"{name} is {value}, wanted a multiple of {step} ({why}); the nearest valid {near}")
    return value


def check_positive(name: str, value: Any, unit: str = "a number") -> float:
    """`value` as a float, if it is a finite number > 0."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ArgumentTypeError(f"{name} is {value!r} ({type(value).__name__}), wanted {unit} > 0")
    if not 0 < value < math.inf:
        raise ArgumentError(f"{name} is {value}, wanted {unit} > 0 and finite")
    return float(value)


def check_one_of(name: str, value: Any, valid: tuple[str, ...]) -> str:
    """`value`, if it is one of `valid`."""
    if value not in valid:
        raise ArgumentError(f"{name} is {value!r}, wanted one of {', '.join(valid)}")
    return value


def check_layer_sizes(*, world: int, rank: int, num_experts: Any, top_k: Any, hidden_size: Any, intermediate_size: Any,
                      max_tokens_per_rank: Any, mode: Any) -> None:
    """Raises ArgumentError at the first size that a layer cannot have. `world` and `rank` are those of its group."""
    check_count("world", world)
    check_count("rank", rank, least=0, most=world - 1)
    if mode not in MODES:
        raise ArgumentError(f"mode is {mode!r}, wanted one of {', '.join(MODES)} (a mix of both is not supported: make one layer "
                            "per group)")
    check_count("num_experts", num_experts)
    check_count("top_k", top_k, most=min(MAX_TOP_K, num_experts))
    check_width("hidden_size", hidden_size)
    check_count("intermediate_size", intermediate_size, least=world if mode == "tp" else 1)
    check_count("max_tokens_per_rank", max_tokens_per_rank)
