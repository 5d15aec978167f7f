"""Memory: sizes (geometry, layout, estimate) and the buffers made to them (shm, workspace)."""

from __future__ import annotations

from moe_tk.memory.estimate import estimate_memory
from moe_tk.memory.geometry import Geometry
from moe_tk.memory.layout import MemoryEstimate

__all__ = ["Geometry", "MemoryEstimate", "estimate_memory"]
