"""The planner: pure functions from sizes and facts to choices. Knows neither kernels nor torch."""

from __future__ import annotations

from moe_tk.planner.accounts import ceiling, waves
from moe_tk.planner.fused_tiles import FUSED_VARIANTS, FusedVariant, choose_variant, expected_blocks, variant_index
from moe_tk.planner.fusion import (
    LARGE_TILE_ROWS,
    SERIAL_LARGE_TILE_ROWS,
    Choice,
    LayerWork,
    choose_fusion,
    explain_fusion,
    row_block_of,
)
from moe_tk.planner.machine import Machine, machine_of
from moe_tk.planner.plan import Plan, make_plan

__all__ = [
    "FUSED_VARIANTS", "LARGE_TILE_ROWS", "SERIAL_LARGE_TILE_ROWS", "Choice", "FusedVariant", "LayerWork", "Machine", "Plan",
    "ceiling", "choose_fusion", "choose_variant", "expected_blocks", "explain_fusion", "machine_of", "make_plan", "row_block_of",
    "variant_index", "waves",
]
