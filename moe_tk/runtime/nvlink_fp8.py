"""Weights of an e4m3 layer on the CUDA back end: checks of their scales, quantisation, and the engine's layout."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_tk.arguments import check_tensor
from moe_tk.errors import ArgumentError
from moe_tk.ops.gemm_weights import SCALE_BLOCK, interleave_gate_up, quantise_weights, scale_pairs

E4M3 = torch.float8_e4m3fn


@dataclass(frozen=True, eq=False)
class ScaledWeights:
    """One rank's e4m3 weights as the engine orders them, at least one expert: w13 [E, 2I, H] with gate and up rows interleaved,
    w2 [E, H, I], float32 scale pairs [E, N / 128, K / 128, 2] of each. The fused kernels want w13 and w2 in tiles besides."""

    w13: Tensor
    w2: Tensor
    w13_scales: Tensor
    w2_scales: Tensor


def check_scales(name: str, weights: Tensor, scales: Tensor | None, *, transposed: bool, device: torch.device) -> Tensor | None:
    """`scales`, if they are those of `weights`: one for each 128 x 128, float32, in the order of the weights' extents; None for
    weights that are not quantised yet. Raises ArgumentError."""
    if weights.dtype != E4M3:
        if scales is not None:
            raise ArgumentError(f"{name}_scale is given, but {name} is {weights.dtype}: scales belong to float8_e4m3fn weights")
        return None
    if scales is None:
        raise ArgumentError(f"{name} is float8_e4m3fn, so {name}_scale is wanted: float32, one for each {SCALE_BLOCK} x "
                            f"{SCALE_BLOCK}")
    experts, rows, columns = weights.shape
    shape = (experts, rows // SCALE_BLOCK, columns // SCALE_BLOCK)
    names = {"w13": ("2I", "H"), "w2": ("H", "I")}[name]
    first, second = reversed(names) if transposed else names
    return check_tensor(f"{name}_scale", scales, dtypes=(torch.float32,), shape=shape, device=device,
                        layout=f"[E_local, {first}/128, {second}/128]")


def quantised(w: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """(e4m3 [E, N, K], float32 scales [E, N / 128, K / 128]): as given, or of bfloat16 w, expert by expert to bound the memory."""
    if scale is not None:
        return w.contiguous(), scale.contiguous()
    experts, rows, depth = w.shape
    out = torch.empty(w.shape, dtype=E4M3, device=w.device)
    scales = torch.empty(experts, rows // SCALE_BLOCK, depth // SCALE_BLOCK, dtype=torch.float32, device=w.device)
    for expert in range(experts):
        values, scales[expert:expert + 1] = quantise_weights(w[expert:expert + 1])
        out[expert:expert + 1].view(torch.uint8).copy_(values.view(torch.uint8))
    return out, scales


def scaled_weights(w13: Tensor, w2: Tensor, w13_scale: Tensor | None, w2_scale: Tensor | None) -> ScaledWeights:
    """w13 [E, 2I, H] (gate rows first) and w2 [E, H, I] with their scales, or bfloat16 without, in the engine's order. w2 is not
    copied where it is e4m3 already."""
    (first, first_scale), (second, second_scale) = quantised(w13, w13_scale), quantised(w2, w2_scale)
    if w13.shape[0] == 0:  # the kernels want an address; no task reads it
        first, second = (torch.zeros(1, *w.shape[1:], dtype=torch.uint8, device=w.device).view(E4M3) for w in (first, second))
        first_scale, second_scale = (torch.zeros(1, *s.shape[1:], device=s.device) for s in (first_scale, second_scale))
    return ScaledWeights(interleave_gate_up(first), second, scale_pairs(first_scale, gate_up=True), scale_pairs(second_scale))
