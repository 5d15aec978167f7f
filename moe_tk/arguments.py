"""Checks of the tensors that the layer and the ops get: one sentence each, before anything is sent or allocated."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_tk.config import env
from moe_tk.errors import ArgumentError, ArgumentTypeError

COPY_LIMIT_BYTES = 64 * 2**20  # a strided input up to this size is copied, a larger one is refused
ID_DTYPES = (torch.int32, torch.int64)
WEIGHT_DTYPES = (torch.float32, torch.bfloat16)
CPU = torch.device("cpu")
COMPUTE_DTYPES = (torch.bfloat16, torch.float32)


def names(dtypes: tuple[torch.dtype, ...]) -> str:
    return " or ".join(str(d).removeprefix("torch.") for d in dtypes)


def check_tensor(name: str, value: Any, *, dtypes: tuple[torch.dtype, ...], shape: tuple[int | None, ...], layout: str,
                 device: torch.device = CPU) -> Tensor:
    """`value`, if it is a tensor on `device` of one of `dtypes` and of `shape` (None = any extent) that needs no gradient."""
    if not isinstance(value, Tensor):
        raise ArgumentTypeError(f"{name} must be a tensor {layout}, got {type(value).__name__}")
    if value.dtype not in dtypes:
        raise ArgumentTypeError(f"{name} has dtype {str(value.dtype).removeprefix('torch.')}, wanted {names(dtypes)}")
    if value.device != device and (value.device.type, device.type) != ("cpu", "cpu"):
        place = "the CPU back end: move it with .cpu()" if device == CPU else str(device)
        raise ArgumentError(f"{name} is on {value.device}, but this layer runs on {place}")
    if value.layout != torch.strided:
        raise ArgumentTypeError(f"{name} has layout {value.layout}, wanted a dense tensor: pass {name}.to_dense()")
    if value.dim() != len(shape) or any(want is not None and have != want for have, want in zip(value.shape, shape, strict=True)):
        wanted = [("any" if extent is None else extent) for extent in shape]
        raise ArgumentError(f"{name} has shape {list(value.shape)}, wanted {layout} = {wanted}".replace("'", ""))
    if value.requires_grad and torch.is_grad_enabled():
        raise ArgumentError(f"{name} has requires_grad=True, but moe_tk has the forward pass only: call it under torch.no_grad() "
                            f"or pass {name}.detach()")
    return value


def as_contiguous(name: str, value: Tensor) -> Tensor:
    """`value` with rows one after the other: copied if it is strided and not too large to do that silently."""
    if value.is_contiguous():
        return value
    size = value.numel() * value.element_size()
    if size > COPY_LIMIT_BYTES:
        raise ArgumentError(f"{name} has strides {value.stride()} and {size / 2**20:.0f} MiB: strided inputs are copied up to "
                            f"{COPY_LIMIT_BYTES // 2**20} MiB; pass {name}.contiguous()")
    return value.contiguous()


def check_routing_tensors(topk_ids: Any, topk_weights: Any, *, num_tokens: int, top_k: int | None,
                          device: torch.device = CPU) -> tuple[Tensor, Tensor]:
    """(topk_ids, topk_weights) as they are, if both are [T, k] on `device` and in the right order."""
    if isinstance(topk_ids, Tensor) and isinstance(topk_weights, Tensor):
        if topk_ids.is_floating_point() and not topk_weights.is_floating_point():
            raise ArgumentTypeError(f"topk_ids is {topk_ids.dtype} and topk_weights is {topk_weights.dtype}: are they swapped? The "
                                    "order is (hidden_states, topk_ids, topk_weights)")
    shape = (num_tokens, top_k)
    ids = check_tensor("topk_ids", topk_ids, dtypes=ID_DTYPES, shape=shape, layout="[T, k]", device=device)
    return ids, check_tensor("topk_weights", topk_weights, dtypes=WEIGHT_DTYPES, shape=shape, layout="[T, k]", device=device)


def check_routing(topk_ids: Any, topk_weights: Any, *, num_tokens: int, top_k: int | None, num_experts: int,
                  rank: int) -> tuple[Tensor, Tensor]:
    """(topk_ids [T, k] int32, topk_weights [T, k] float32), if they can be a routing of `num_tokens` tokens.

    -1 and ids >= num_experts mean "skip" and come back as -1, so that no 64-bit id can wrap into a valid one; with
    MOE_TK_VALIDATE=1 only -1 does, and other ids outside are refused.
    """
    ids, weights = check_routing_tensors(topk_ids, topk_weights, num_tokens=num_tokens, top_k=top_k)
    weights = weights.float()
    valid = (ids >= 0) & (ids < num_experts)
    bad = valid & ~torch.isfinite(weights)
    if bad.any():
        token, choice = (int(i) for i in bad.nonzero()[0])
        raise ArgumentError(f"topk_weights[{token}, {choice}] is {weights[token, choice].item()} on rank {rank}, wanted a finite "
                            "number")
    if env("MOE_TK_VALIDATE"):
        outside = ~valid & (ids != -1)
        if outside.any():
            token, choice = (int(i) for i in outside.nonzero()[0])
            raise ArgumentError(f"topk_ids[{token}, {choice}] is {ids[token, choice].item()} on rank {rank}, wanted -1 (skip) or "
                                f"0..{num_experts - 1}")
    return torch.where(valid, ids, -1).to(torch.int32), weights
