"""Weights and scales in the layout of the grouped GEMM with SwiGLU in its epilogue; and the quantisation to e4m3."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_tk.errors import ArgumentError

SCALE_BLOCK = 128      # of K for activations, of K and of N for weights: the format of DeepSeek-V3 checkpoints
E4M3_MAX = 448.0


def interleave_gate_up(w13: Tensor) -> Tensor:
    """[E, 2I, K] with gate rows first -> gate and up rows in alternating groups of 8, as the epilogue wants them.

    bfloat16 and float32: group b holds outputs 8b ... 8b + 7. e4m3: the epilogue writes bytes, four neighbours a thread, so
    inside 16 outputs row 2q + i of group e is output 4q + 2e + i. I must be a multiple of 64 (e4m3: of 128).
    """
    experts, rows, depth = w13.shape
    width, step = rows // 2, 128 if w13.dtype == torch.float8_e4m3fn else 64
    if rows % 2 or width % step:
        raise ArgumentError(f"w13 has {rows} rows an expert; wanted 2 I with I a multiple of {step}, nearest: "
                            f"{2 * max(width // step, 1) * step} or {2 * (width // step + 1) * step}")
    order = gate_up_order(width, w13.dtype == torch.float8_e4m3fn).to(w13.device)
    if w13.dtype == torch.float8_e4m3fn:
        return w13.view(torch.uint8)[:, order].contiguous().view(w13.dtype)
    return w13[:, order].contiguous()


def gate_up_order(width: int, quantised: bool) -> Tensor:
    """Row of w13 (gate rows first) that each interleaved row is, [2 I] int64."""
    outputs = torch.arange(width)
    if quantised:
        outputs = outputs.view(-1, 4, 2, 2).transpose(1, 2).reshape(-1)
    groups = outputs.view(-1, 8)
    return torch.stack([groups, groups + width], 1).reshape(-1)


def scale_pairs(scales: Tensor, *, gate_up: bool = False) -> Tensor:
    """[E, ceil(N / 128), K / 128] float32 weight scales -> [E, ceil(N / 128), K / 128, 2] as the kernel reads them.

    gate_up: of w13 with gate rows first; the pair is then that of the gate and of the up columns.
    """
    if not gate_up:
        return torch.stack([scales, scales], -1).contiguous()
    blocks = scales.shape[1]
    pairs = torch.stack([scales[:, : blocks // 2], scales[:, blocks // 2:]], -1)
    return pairs.repeat_interleave(2, 1).contiguous()


def quantise_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """[M, K] -> e4m3 [M, K] and float32 scales [K / 128, M]; K a multiple of 128."""
    rows, depth = x.shape
    blocks = x.float().view(rows, depth // SCALE_BLOCK, SCALE_BLOCK)
    scales = _scales_of(blocks.abs().amax(-1))
    return (blocks / scales[..., None]).to(torch.float8_e4m3fn).view(rows, depth), scales.t().contiguous()


def quantise_weights(w: Tensor) -> tuple[Tensor, Tensor]:
    """[E, N, K] -> e4m3 [E, N, K] and float32 scales [E, ceil(N / 128), K / 128]; K a multiple of 128."""
    experts, rows, depth = w.shape
    padded = torch.nn.functional.pad(w.float(), (0, 0, 0, -rows % SCALE_BLOCK))
    blocks = padded.view(experts, -1, SCALE_BLOCK, depth // SCALE_BLOCK, SCALE_BLOCK)
    scales = _scales_of(blocks.abs().amax((2, 4)))
    quantised = (blocks / scales[:, :, None, :, None]).to(torch.float8_e4m3fn)
    return quantised.view(torch.uint8).view(experts, -1, depth)[:, :rows].contiguous().view(torch.float8_e4m3fn), scales


def dequantise_rows(x: Tensor, scales: Tensor) -> Tensor:
    """The float32 values of quantise_rows' result."""
    return x.float() * scales.t().repeat_interleave(SCALE_BLOCK, 1)


def dequantise_weights(w: Tensor, scales: Tensor) -> Tensor:
    """The float32 values of quantise_weights' result."""
    return w.float() * scales.repeat_interleave(SCALE_BLOCK, 1)[:, : w.shape[1]].repeat_interleave(SCALE_BLOCK, 2)


def _scales_of(largest: Tensor) -> Tensor:
    return torch.where(largest == 0, torch.ones_like(largest), largest / E4M3_MAX)
