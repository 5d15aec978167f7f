"""What ours and the rivals have in common."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from moe_tk.bench.problem import Batch


class NotAvailable(Exception):
    """A contender cannot run here: the text is the reason, for the table."""


@dataclass(frozen=True, eq=False)
class Call:
    """One prepared call: run() launches it, on every rank together; `result` [T, H] is what it writes."""

    run: Callable[[], Any]
    result: Tensor
    capturable: bool = True  # in a CUDA graph


class Contender(Protocol):
    """One way to compute the layer, made once for a shape and mode."""

    name: str
    ours: bool

    def prepare(self, batch: Batch) -> Call:
        """Buffers and whatever a user does once, not per call. A collective. Raises NotAvailable."""

    def finish(self) -> None:
        """Waits for the calls and raises what they failed with."""
