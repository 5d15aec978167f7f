"""e4m3 weights of an MoE layer in the form that the operations and the grouped GEMM read, made once from a checkpoint's."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_tk.arguments import check_tensor
from moe_tk.errors import ArgumentError, ArgumentTypeError
from moe_tk.sizes import check_multiple
from moe_tk.weights.gemm import SCALE_BLOCK, interleave_gate_up, quantise_weights, scale_pairs

E4M3 = torch.float8_e4m3fn
WHY_MULTIPLE = f"e4m3: a scale covers {SCALE_BLOCK} columns"


@dataclass(frozen=True, eq=False)
class ScaledWeights:
    """One rank's e4m3 weights in rows: w13 [E, 2I, H] with gate and up rows interleaved (interleave_gate_up), w2 [E, H, I];
    float32 scale pairs (scale_pairs) w13_scales [E, 2I / 128, H / 128, 2] and w2_scales [E, H / 128, I / 128, 2]."""

    w13: Tensor
    w2: Tensor
    w13_scales: Tensor
    w2_scales: Tensor


def scaled_weights(w13: Tensor, w2: Tensor, *, w13_scale: Tensor | None = None, w2_scale: Tensor | None = None) -> ScaledWeights:
    """What mega_moe, dispatch_gemm and gemm_combine take in e4m3, from a rank's weights in a checkpoint's order; on their device.

    w13 [E_local, 2I, H] (gate rows first) and w2 [E_local, H, I]: float8_e4m3fn with float32 scales [E_local, 2I/128, H/128] and
    [E_local, H/128, I/128] (value = weight * scale: weight_scale_inv of DeepSeek-V3), or both bfloat16, quantised here. H and I
    are multiples of 128. w13 is copied, w2 only where it is quantised. Do it once: the operations convert nothing.
    """
    device = w13.device if isinstance(w13, Tensor) else torch.device("cpu")
    dtypes = (E4M3, torch.bfloat16)
    check_tensor("w13", w13, dtypes=dtypes, shape=(None, None, None), layout="[E_local, 2I, H]", device=device)
    experts, rows, hidden = w13.shape
    check_tensor("w2", w2, dtypes=dtypes, shape=(experts, hidden, rows // 2), layout="[E_local, H, I]", device=device)
    if w13.dtype != w2.dtype:
        raise ArgumentTypeError(f"w13 is {w13.dtype} and w2 is {w2.dtype}, wanted one dtype for both")
    check_multiple("w13.size(1)", rows, 2 * SCALE_BLOCK, WHY_MULTIPLE)
    check_multiple("w13.size(2)", hidden, SCALE_BLOCK, WHY_MULTIPLE)
    return ordered(w13.detach(), w2.detach(), check_scales("w13", w13, w13_scale, transposed=False, device=device),
                   check_scales("w2", w2, w2_scale, transposed=False, device=device))


def ordered(w13: Tensor, w2: Tensor, w13_scale: Tensor | None, w2_scale: Tensor | None) -> ScaledWeights:
    """scaled_weights of arguments that have been checked."""
    (first, first_scale), (second, second_scale) = quantised(w13, w13_scale), quantised(w2, w2_scale)
    return ScaledWeights(interleave_gate_up(first), second, scale_pairs(first_scale, gate_up=True), scale_pairs(second_scale))


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
