"""Cases of the grouped GEMM: layouts of rows, operands, and a float64 oracle that shares no code with what is tested."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_tk.weights import gemm as gemm_weights

FORMS = {"swiglu": (1.0, 0.0, None), "clamped": (1.0, 0.0, 1.5), "gpt-oss": (1.702, 1.0, 2.0)}


@dataclass(frozen=True, eq=False)
class Layout:
    """Experts of `counts` rows, each padded to the row block."""

    counts: tuple[int, ...]
    row_block: int
    device: torch.device

    @property
    def offsets(self) -> list[int]:
        starts = [0]
        for count in self.counts:
            starts.append(starts[-1] + -(-count // self.row_block) * self.row_block)
        return starts

    @property
    def num_slots(self) -> int:
        return max(self.offsets[-1], self.row_block)

    def tensors(self) -> tuple[Tensor, Tensor]:
        return (torch.tensor(self.offsets, dtype=torch.int32, device=self.device),
                torch.tensor(self.counts, dtype=torch.int32, device=self.device))

    def real_rows(self) -> Tensor:
        real = torch.zeros(self.num_slots, dtype=torch.bool, device=self.device)
        for start, count in zip(self.offsets, self.counts, strict=False):
            real[start:start + count] = True
        return real


def oracle(x: Tensor, w13_or_w: Tensor, layout: Layout, form: str | None, slot_weight: Tensor | None) -> Tensor:
    """float64 [S, N or I], zero in padding. Weights in their original order, gate rows first."""
    result = torch.zeros(x.shape[0], w13_or_w.shape[1], dtype=torch.float64, device=x.device)
    for expert, (start, count) in enumerate(zip(layout.offsets, layout.counts, strict=False)):
        result[start:start + count] = x[start:start + count].double() @ w13_or_w[expert].double().t()
    if form is None:
        return result
    alpha, beta, limit = FORMS[form]
    limit = math.inf if limit is None else limit
    gate, up = result.chunk(2, 1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    result = gate / (1 + torch.exp(-alpha * gate)) * (up + beta)
    return result if slot_weight is None else result * slot_weight[:, None].double()


def random_rows(layout: Layout, depth: int, generator: torch.Generator) -> Tensor:
    """float32 [S, K] with NaN in every padding row: padding must not leak."""
    x = torch.randn(layout.num_slots, depth, generator=generator, device=layout.device)
    return x.masked_fill_(~layout.real_rows()[:, None], math.nan)


def form_arguments(form: str | None) -> dict:
    if form is None:
        return {}
    alpha, beta, limit = FORMS[form]
    return {"activation": "swiglu", "alpha": alpha, "beta": beta, "limit": limit}


def quantised_operands(x: Tensor, w: Tensor, gate_up: bool) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(e4m3 x, its scales, prepared e4m3 w, its scale pairs, the values of x, the values of w in original order)."""
    quantised_x, x_scale = gemm_weights.quantise_rows(x.nan_to_num(0.0))
    quantised_w, w_scale = gemm_weights.quantise_weights(w)
    prepared = gemm_weights.interleave_gate_up(quantised_w) if gate_up else quantised_w
    pairs = gemm_weights.scale_pairs(w_scale, gate_up=gate_up)
    values = gemm_weights.dequantise_rows(quantised_x, x_scale), gemm_weights.dequantise_weights(quantised_w, w_scale)
    return quantised_x, x_scale, prepared, pairs, *values


def relative_error(got: Tensor, want: Tensor) -> float:
    """Frobenius norm of the difference over that of `want`; NaN stays NaN, so that `<=` fails."""
    return float((got.double() - want).norm() / want.norm().clamp_min(1e-300))
