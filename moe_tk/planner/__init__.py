"""The planner: pure functions from sizes and facts to choices. Knows neither kernels nor torch."""

from __future__ import annotations

from moe_tk.planner.accounts import ceiling, waves
from moe_tk.planner.plan import Plan, make_plan

__all__ = ["Plan", "ceiling", "make_plan", "waves"]
