"""Grouped GEMM of torch: torch._grouped_mm, bfloat16, offsets on the device. Rows are gathered by index_select before it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_tk.bench.contender import NotAvailable
from moe_tk.bench.problem import Problem


class Gemm:
    """rivals.serial.GroupedGemm."""

    def __init__(self, problem: Problem) -> None:
        if not hasattr(torch, "_grouped_mm"):
            raise NotAvailable(f"torch {torch.__version__} has no grouped GEMM")
        w13, w2 = problem.local_weights()
        self.w13, self.w2 = w13.transpose(1, 2), w2.transpose(1, 2)

    def tune(self, example: Any, x: Tensor) -> None:
        """Nothing to choose."""

    def first(self, x: Tensor, routed: Any) -> Tensor:
        return torch._grouped_mm(x.index_select(0, routed.token), self.w13, offs=routed.ends)

    def second(self, act: Tensor, routed: Any) -> Tensor:
        return torch._grouped_mm(act, self.w2, offs=routed.ends)
