"""Grouped GEMM of DeepGEMM (bf16, contiguous layout). NEVER RUN WITH THE REAL LIBRARY: written after its documented call
m_grouped_bf16_gemm_nt_contiguous(a, b, d, m_indices), and tested with a stand-in only. A failure is shown in the table."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from moe_tk.bench.contender import NotAvailable
from moe_tk.bench.problem import Problem

ALIGNMENT_NAMES = ("get_mk_alignment_for_contiguous_layout", "get_m_alignment_for_contiguous_layout")  # newer, older
USUAL_ALIGNMENT = 128


class Gemm:
    """rivals.serial.GroupedGemm; each expert's rows begin at a multiple of `alignment`."""

    def __init__(self, problem: Problem) -> None:
        try:
            self.library = importlib.import_module("deep_gemm")
        except ImportError as error:
            raise NotAvailable(f"not installed: {error}") from None
        if not hasattr(self.library, "m_grouped_bf16_gemm_nt_contiguous"):
            raise NotAvailable("this DeepGEMM has no grouped GEMM for bfloat16")
        ask = next((getattr(self.library, name) for name in ALIGNMENT_NAMES if hasattr(self.library, name)), None)
        self.alignment = int(ask()) if ask else USUAL_ALIGNMENT
        self.w13, self.w2 = problem.local_weights()

    def tune(self, example: Any, x: Tensor) -> None:
        """Nothing to choose: the library does."""

    def first(self, x: Tensor, routed: Any) -> Tensor:
        return self._multiply(x.index_select(0, routed.token), self.w13, routed)

    def second(self, act: Tensor, routed: Any) -> Tensor:
        return self._multiply(act, self.w2, routed)

    def _multiply(self, rows: Tensor, w: Tensor, routed: Any) -> Tensor:
        out = torch.empty(rows.shape[0], w.shape[1], dtype=rows.dtype, device=rows.device)
        self.library.m_grouped_bf16_gemm_nt_contiguous(rows, w, out, routed.experts)
        return out
