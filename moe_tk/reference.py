"""The unfused layer in float64, written for reading: the oracle of every test and of the demo. No schedule, no kernels."""

from __future__ import annotations

import torch
from torch import Tensor


def activate(gate: Tensor, up: Tensor, *, alpha: float = 1.0, beta: float = 0.0, gate_limit: float | None = None,
             up_limit: float | None = None) -> Tensor:
    """g * sigmoid(alpha * g) * (u + beta), after g <= gate_limit and |u| <= up_limit where given. Any shape.

    alpha=1, beta=0 is SwiGLU (Shazeer 2020); with limits the clamped form; alpha=1.702, beta=1, both limits 7 the
    gpt-oss form.
    """
    if gate_limit is not None:
        gate = gate.clamp(max=gate_limit)
    if up_limit is not None:
        up = up.clamp(-up_limit, up_limit)
    return gate * torch.sigmoid(alpha * gate) * (up + beta)


def moe_layer(hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor, w13: Tensor, w2: Tensor, *, alpha: float = 1.0,
              beta: float = 0.0, gate_limit: float | None = None, up_limit: float | None = None) -> Tensor:
    """Whole layer for all experts on one process, float64 throughout.

    hidden_states [T, H]; topk_ids [T, k] (ids outside 0..E-1 are skipped); topk_weights [T, k];
    w13 [E, 2I, H], gate rows first; w2 [E, H, I]. Returns [T, H] float64; rows without a valid id are zero.
    """
    x = hidden_states.double()
    out = torch.zeros_like(x)
    inter = w2.shape[2]
    for expert in range(w13.shape[0]):
        token, choice = torch.nonzero(topk_ids == expert, as_tuple=True)
        if token.numel() == 0:
            continue
        both = x[token] @ w13[expert].double().T
        act = activate(both[:, :inter], both[:, inter:], alpha=alpha, beta=beta, gate_limit=gate_limit, up_limit=up_limit)
        rows = act @ w2[expert].double().T
        out.index_add_(0, token, rows * topk_weights[token, choice].double()[:, None])
    return out


def relative_error(got: Tensor, want: Tensor) -> float:
    """||got - want|| / ||want|| in float64; 0 if both are zero. NaN in `got` gives NaN, which no budget admits."""
    error = torch.linalg.vector_norm(got.double() - want.double()).item()
    norm = torch.linalg.vector_norm(want.double()).item()
    return error if norm == 0 else error / norm


# Relative error (of norms) that rounding explains, by element type: operands and stored intermediates (the activation, the
# expert's output, the partial row, the result) are each rounded once, by at most 2^-8 (bfloat16) or 2^-24 (float32; its sums
# over K add to that) and by half of that in the mean square. Independent roundings add like squares: sqrt(5) * 2^-9 = 0.0044,
# and 0.01 leaves a factor two. A result of few elements has no mean: one of them can be off by four times 2^-8 of its terms.
#
# float8_e4m3fn: against this oracle over the values of the quantised weights and rows, so the activation between the GEMMs is
# what is rounded, to 3 bits behind the leading one. A mantissa m in [1, 2) is off by 2^-4 / sqrt(3) in the mean square; over
# logarithmically even m, whose mean square is 2.16, that is 0.036 / 1.47 = 0.025 of the norm. 0.035 leaves a factor 1.4.
ERROR_BUDGET = {torch.bfloat16: 1e-2, torch.float32: 1e-5, torch.float8_e4m3fn: 3.5e-2}
