"""Grouped GEMM written in Triton (rivals.triton_kernels): simple, the tile chosen by trying a few on the rows of the call."""

from __future__ import annotations

import statistics
from typing import Any

import torch
from torch import Tensor

from moe_tk.bench.contender import NotAvailable
from moe_tk.bench.problem import Problem


def _tile(m: int, n: int, k: int, warps: int, stages: int) -> dict[str, int]:
    return {"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k, "GROUP": 8, "num_warps": warps, "num_stages": stages}


SMALL = (_tile(16, 128, 128, 4, 4), _tile(64, 128, 64, 4, 4))                          # mean rows of an expert below MANY_ROWS
LARGE = (_tile(64, 128, 64, 4, 4), _tile(128, 128, 64, 8, 4), _tile(128, 256, 64, 8, 3))
MANY_ROWS = 48
TRIES = 5


class Gemm:
    """rivals.serial.GroupedGemm."""

    def __init__(self, problem: Problem) -> None:
        if problem.device.type != "cuda":
            raise NotAvailable("Triton wants a GPU")
        try:
            from moe_tk.bench.rivals import triton_kernels
        except ImportError as error:
            raise NotAvailable(f"not installed: {error}") from None
        self.kernels, self.device = triton_kernels, problem.device
        self.w13, self.w2 = problem.local_weights()
        self.tiles = (SMALL[0], SMALL[0])

    def tune(self, example: Any, x: Tensor) -> None:
        """The faster tile for each GEMM, on this rank's rows."""
        rows = example.token.numel()
        if rows == 0:
            return
        candidates = LARGE if rows >= MANY_ROWS * example.ends.numel() else SMALL
        act = torch.zeros(rows, self.w2.shape[2], dtype=x.dtype, device=x.device)
        first = min(candidates, key=lambda tile: self._time(x, example.token, self.w13, example, rows, tile))
        second = min(candidates, key=lambda tile: self._time(act, None, self.w2, example, rows, tile))
        self.tiles = (first, second)

    def _time(self, x: Tensor, token: Tensor | None, w: Tensor, example: Any, rows: int, tile: dict[str, int]) -> float:
        times = []
        for _ in range(TRIES + 1):
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            before.record()
            self.kernels.grouped_gemm(x, token, w, example.ends, rows, tile)
            after.record()
            after.synchronize()
            times.append(before.elapsed_time(after))
        return statistics.median(times[1:])

    def first(self, x: Tensor, routed: Any) -> Tensor:
        return self.kernels.grouped_gemm(x, routed.token, self.w13, routed.ends, routed.token.numel(), self.tiles[0])

    def second(self, act: Tensor, routed: Any) -> Tensor:
        return self.kernels.grouped_gemm(act, None, self.w2, routed.ends, routed.token.numel(), self.tiles[1])
