"""Weights of an e4m3 layer on the CUDA back end."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_tk.weights.scaled import E4M3, ScaledWeights, ordered


def layer_weights(w13: Tensor, w2: Tensor, w13_scale: Tensor | None, w2_scale: Tensor | None) -> ScaledWeights:
    """w13 [E, 2I, H] (gate rows first) and w2 [E, H, I] with their scales, or bfloat16 without, in the engine's order, of at least
    one expert. w2 is not copied where it is e4m3 already."""
    kept = ordered(w13, w2, w13_scale, w2_scale)
    if w13.shape[0] > 0:
        return kept
    # The kernels want an address; no task reads it.
    weights = (torch.zeros(1, *w.shape[1:], dtype=torch.uint8, device=w.device).view(E4M3) for w in (kept.w13, kept.w2))
    return ScaledWeights(*weights, *(torch.zeros(1, *s.shape[1:], device=s.device) for s in (kept.w13_scales, kept.w2_scales)))
