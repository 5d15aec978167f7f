"""The schedule: routing of all ranks in, tables for one rank out (docs/schedule.md).

Names are resolved on first use, so that sizes and ownership can be had without loading torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moe_tk.schedule.build import build_tables, trim
    from moe_tk.schedule.capacity import flat_offset, max_segment_blocks, max_slots
    from moe_tk.schedule.invariants import check_ids, check_tables
    from moe_tk.schedule.orders import mega_order, task_order
    from moe_tk.schedule.ownership import expert_range, local_experts, shard_range
    from moe_tk.schedule.readiness_report import Readiness, readiness
    from moe_tk.schedule.routings import Routing, flame_routing, make_routing, trace_routing
    from moe_tk.schedule.tables import Tables
    from moe_tk.schedule.vectorised import PaddedTables, build_padded

_LAZY = {
    "PaddedTables": "vectorised", "Readiness": "readiness_report", "Routing": "routings", "Tables": "tables",
    "build_padded": "vectorised", "build_tables": "build", "check_ids": "invariants", "check_tables": "invariants",
    "expert_range": "ownership", "flame_routing": "routings", "flat_offset": "capacity", "local_experts": "ownership",
    "make_routing": "routings", "max_segment_blocks": "capacity", "max_slots": "capacity", "mega_order": "orders",
    "readiness": "readiness_report", "shard_range": "ownership", "task_order": "orders", "trace_routing": "routings",
    "trim": "build",
}

__all__ = [
    "PaddedTables", "Readiness", "Routing", "Tables", "build_padded", "build_tables", "check_ids", "check_tables",
    "expert_range", "flame_routing", "flat_offset", "local_experts", "make_routing", "max_segment_blocks", "max_slots",
    "mega_order", "readiness", "shard_range", "task_order", "trace_routing", "trim",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'moe_tk.schedule' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"moe_tk.schedule.{_LAZY[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(_LAZY))
