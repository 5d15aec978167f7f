"""The grouped GEMM: one matrix product for each expert over its rows, in one launch, with SwiGLU in the epilogue if wanted."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from moe_tk.errors import ArgumentError, ArgumentTypeError
from moe_tk.runtime import gemm, host
from moe_tk.weights import gemm as gemm_weights

_HOST_DTYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn)


def grouped_gemm(x: Tensor, w: Tensor, expert_offsets: Tensor, *, expert_rows: Tensor | None = None, row_block: int = 128,
                 activation: str | None = None, alpha: float = 1.0, beta: float = 0.0, limit: float | None = None,
                 slot_weight: Tensor | None = None, x_scale: Tensor | None = None, w_scale: Tensor | None = None,
                 out: Tensor | None = None, tile: str | None = None) -> Tensor | tuple[Tensor, Tensor]:
    """out[s] = act(x[s] @ w[e].T) for every row s of expert e; rows of no expert are left alone, padding rows are unspecified.

    x [S, K], rows contiguous; w [E, N, K] contiguous. bfloat16 or float8_e4m3fn on CUDA, float32 too on the CPU.
    expert_offsets [E + 1] int32 on x's device: first row of each expert, multiples of row_block (64 or 128), not falling, the
    last at most S. expert_rows [E] int32: rows that are not padding, None: all; an expert without rows costs nothing.
    activation "swiglu": w from interleave_gate_up, out is [S, N / 2] = g sigmoid(alpha g) (u + beta) slot_weight[s], after
    limits g <= limit and |u| <= limit (None: none). slot_weight [S] float32.
    e4m3: x_scale [K / 128, S] float32 (S a multiple of 4), w_scale from scale_pairs; the sums are float32. Out is bfloat16; with
    an activation it is e4m3 with new scales, and the result is (out, out_scale [N / 256, S]).
    K and N are multiples of 64 (e4m3: K of 128; with an activation N of 128, e4m3 of 256). tile names a configuration, None:
    chosen.

    On CUDA it runs on the current stream, synchronises nothing and can be captured in a graph. Raises ArgumentError.
    """
    swiglu = _swiglu(activation, alpha, beta, limit)
    _check_operands(x, w, expert_offsets, expert_rows, slot_weight)
    _check_sizes(x, w, swiglu is not None)
    _check_scales(x, w, x_scale, w_scale)
    quantises = swiglu is not None and x.dtype == torch.float8_e4m3fn
    columns = w.shape[1] // 2 if swiglu else w.shape[1]
    kind = torch.float8_e4m3fn if quantises else torch.bfloat16 if x.dtype == torch.float8_e4m3fn else x.dtype
    if out is None:
        out = torch.empty(x.shape[0], columns, dtype=kind, device=x.device)
    elif out.shape != (x.shape[0], columns) or out.dtype != kind or out.device != x.device or out.stride(1) != 1:
        raise ArgumentError(f"out is {tuple(out.shape)} {out.dtype} on {out.device}; wanted {(x.shape[0], columns)} {kind} on "
                            f"{x.device}, rows contiguous")
    out_scale = torch.empty(columns // 128, x.shape[0], device=x.device) if quantises else None
    if x.is_cuda:
        _check_alignment(x, out)
        if x.shape[0] > 0 and w.shape[0] > 0:
            plan = gemm.make_plan(x.dtype, expert_offsets, expert_rows, num_slots=x.shape[0], columns=w.shape[1],
                                  row_block=row_block, activation=swiglu is not None, tile=tile)
            gemm.launch(plan, x, w, out, swiglu=swiglu, slot_weight=slot_weight, x_scale=x_scale, w_scale=w_scale,
                        out_scale=out_scale)
    else:
        _on_host(x, w, expert_offsets, row_block, swiglu, slot_weight, x_scale, w_scale, out, out_scale)
    return (out, out_scale) if out_scale is not None else out


def _swiglu(activation: str | None, alpha: float, beta: float, limit: float | None) -> dict[str, float] | None:
    if activation is None:
        return None
    if activation != "swiglu":
        raise ArgumentError(f"activation is {activation!r}, wanted None or 'swiglu'")
    return {"alpha": alpha, "beta": beta, "limit": math.inf if limit is None else limit}


def _check_operands(x: Tensor, w: Tensor, offsets: Tensor, rows: Tensor | None, slot_weight: Tensor | None) -> None:
    if x.ndim != 2 or w.ndim != 3 or x.shape[1] != w.shape[2]:
        raise ArgumentError(f"x is {tuple(x.shape)} and w is {tuple(w.shape)}; wanted [S, K] and [E, N, K]")
    allowed = tuple(gemm.DTYPES) if x.is_cuda else _HOST_DTYPES
    if x.dtype not in allowed or w.dtype != x.dtype:
        raise ArgumentTypeError(f"x is {x.dtype} and w is {w.dtype}; wanted one of {', '.join(map(str, allowed))} for both")
    if x.stride(1) != 1 or not w.is_contiguous():
        raise ArgumentError(f"strides of x are {x.stride()}, of w {w.stride()}; rows of x and all of w must be contiguous")
    for name, tensor, shape, dtype in (("expert_offsets", offsets, (w.shape[0] + 1,), torch.int32),
                                       ("expert_rows", rows, (w.shape[0],), torch.int32),
                                       ("slot_weight", slot_weight, (x.shape[0],), torch.float32)):
        if tensor is not None and (tensor.shape != shape or tensor.dtype != dtype or not tensor.is_contiguous()):
            raise ArgumentError(f"{name} is {tuple(tensor.shape)} {tensor.dtype}; wanted {shape} {dtype}, contiguous")
        if tensor is not None and tensor.device != x.device:
            raise ArgumentError(f"{name} is on {tensor.device}, x on {x.device}")
    if w.device != x.device:
        raise ArgumentError(f"w is on {w.device}, x on {x.device}")


def _check_sizes(x: Tensor, w: Tensor, activation: bool) -> None:
    scaled = x.dtype == torch.float8_e4m3fn
    steps = {"K": (x.shape[1], 128 if scaled else 64), "N": (w.shape[1], (256 if scaled else 128) if activation else 64)}
    for name, (size, step) in steps.items():
        if size % step or size == 0:
            low = size // step * step
            nearest = f"{low} or {low + step}" if low else f"{step}"
            raise ArgumentError(f"{name} is {size}; wanted a multiple of {step}, nearest: {nearest}")


def _check_scales(x: Tensor, w: Tensor, x_scale: Tensor | None, w_scale: Tensor | None) -> None:
    scaled = x.dtype == torch.float8_e4m3fn
    if scaled != (x_scale is not None) or scaled != (w_scale is not None):
        raise ArgumentError(f"x is {x.dtype}; x_scale and w_scale are {'wanted' if scaled else 'not taken'}")
    if not scaled:
        return
    blocks = x.shape[1] // 128
    for name, tensor, shape in (("x_scale", x_scale, (blocks, x.shape[0])),
                                ("w_scale", w_scale, (w.shape[0], -(-w.shape[1] // 128), blocks, 2))):
        if tensor.shape != shape or tensor.dtype != torch.float32 or not tensor.is_contiguous() or tensor.device != x.device:
            raise ArgumentError(f"{name} is {tuple(tensor.shape)} {tensor.dtype} on {tensor.device}; wanted {shape} float32 on "
                                f"{x.device}, contiguous")
    if x.shape[0] % 4:
        raise ArgumentError(f"x has {x.shape[0]} rows; with scales it must be a multiple of 4, nearest: {x.shape[0] // 4 * 4 + 4}")


def _check_alignment(x: Tensor, out: Tensor) -> None:
    for name, tensor in (("x", x), ("out", out)):
        apart = tensor.stride(0) * tensor.element_size()
        if tensor.data_ptr() % 16 or apart % 16:
            raise ArgumentError(f"{name} starts at {tensor.data_ptr():#x} with rows {apart} bytes apart; both must be multiples "
                                "of 16")


def _on_host(x: Tensor, w: Tensor, offsets: Tensor, row_block: int, swiglu: dict[str, float] | None, slot_weight: Tensor | None,
             x_scale: Tensor | None, w_scale: Tensor | None, out: Tensor, out_scale: Tensor | None) -> None:
    """The host engine. What a GPU keeps in fp32 between product and output stays fp32 here too."""
    bounds = offsets.tolist()
    if any(b < a for a, b in zip(bounds, bounds[1:], strict=False)) or bounds[-1] > x.shape[0] or bounds[0] < 0:
        raise ArgumentError(f"expert_offsets are {bounds}; wanted a non-falling row within [0, {x.shape[0]}]")
    if x_scale is not None and w_scale is not None:
        x, w = gemm_weights.dequantise_rows(x, x_scale), _dequantise_prepared(w, w_scale)
    direct = swiglu is None and out.dtype == x.dtype and out.is_contiguous()
    left, right = (x, w) if direct else (x.float(), w.float())
    product = out if direct else torch.zeros(x.shape[0], w.shape[1])
    left = left.contiguous()
    host.host_module().grouped_gemm(dtype=host.dtype_code(left.dtype), a=left.data_ptr(), weights=right.data_ptr(),
                                    out=product.data_ptr(), offsets=bounds, depth=x.shape[1], columns=w.shape[1],
                                    row_block=row_block)
    if direct:
        return
    rows = slice(bounds[0], bounds[-1])
    if swiglu is None:
        out[rows] = product[rows].to(out.dtype)
        return
    order = gemm_weights.gate_up_order(w.shape[1] // 2, out_scale is not None)
    product = torch.empty_like(product).index_copy_(1, order, product)
    gate, up = product.chunk(2, 1)
    gate, up = gate.clamp(max=swiglu["limit"]), up.clamp(-swiglu["limit"], swiglu["limit"])
    result = gate * torch.sigmoid(swiglu["alpha"] * gate) * (up + swiglu["beta"])
    if slot_weight is not None:
        result = result * slot_weight[:, None]
    if out_scale is None:
        out[rows] = result[rows].to(out.dtype)
        return
    quantised, scales = gemm_weights.quantise_rows(result)
    out.view(torch.uint8)[rows] = quantised.view(torch.uint8)[rows]
    out_scale[:, rows] = scales[:, rows]


def _dequantise_prepared(w: Tensor, pairs: Tensor) -> Tensor:
    """Float32 weights from e4m3 rows and scale pairs: of 128 rows, groups of 8 alternate between the two scales."""
    groups = pairs.permute(0, 1, 3, 2)[:, :, None].expand(-1, -1, 8, -1, -1)      # [E, blocks, 8, 2, K / 128]
    rows = groups.reshape(w.shape[0], -1, pairs.shape[2]).repeat_interleave(8, 1)[:, : w.shape[1]]
    return w.float() * rows.repeat_interleave(128, 2)
