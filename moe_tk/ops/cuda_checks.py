"""Checks of what the ops get on CUDA, in bfloat16 and in e4m3: one sentence each, before anything is sent or allocated.

The weights say which of the two a call is. Names of weights are "w13" and "w2", of their scales "w13_scales" and "w2_scales".
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_tk.arguments import as_contiguous, check_routing_tensors, check_tensor
from moe_tk.errors import ArgumentError
from moe_tk.memory.nvlink_layout import MAX_TOP_K, SCALE_BLOCK
from moe_tk.sizes import check_count, check_multiple, check_width
from moe_tk.weights.scaled import E4M3, WHY_MULTIPLE

BF16 = (torch.bfloat16,)
FLOAT32 = (torch.float32,)


def readable(name: str, value: Tensor) -> Tensor:
    """`value` with rows one after the other, at an address that bulk copies can read."""
    value = as_contiguous(name, value)
    return value if value.data_ptr() % 16 == 0 else value.clone()


def is_e4m3(value: Any) -> bool:
    """Whether a tensor makes its call one in e4m3."""
    return isinstance(value, Tensor) and value.dtype == E4M3


def check_scaled_width(name: str, size: int) -> int:
    """`size`, if whole blocks of scales cover it."""
    return check_multiple(name, size, SCALE_BLOCK, WHY_MULTIPLE)


def check_unscaled(name: str, scales: Any, owner: str, dtype: torch.dtype) -> None:
    """Raises ArgumentError when scales come with a tensor that has none."""
    if scales is not None:
        raise ArgumentError(f"{name} are given, but {owner} is {str(dtype).removeprefix('torch.')}: scales belong to float8_e4m3fn")


def check_scales(name: str, scales: Any, owner: str, *, shape: tuple[int, ...], layout: str, device: torch.device) -> Tensor:
    """The float32 scales of the e4m3 tensor `owner`."""
    if scales is None:
        raise ArgumentError(f"{owner} is float8_e4m3fn, so {name} {layout} = {list(shape)} float32 are wanted")
    return readable(name, check_tensor(name, scales, dtypes=FLOAT32, shape=shape, layout=layout, device=device))


def check_hidden(hidden_states: Any, hidden_scales: Any, *, quantised: bool, device: torch.device) -> tuple[Tensor, Tensor | None]:
    """(hidden_states [T, H], their scales [T, H / 128] or None). An e4m3 call takes bfloat16 too: the kernel quantises."""
    dtypes = (*BF16, E4M3) if quantised else BF16
    hidden = check_tensor("hidden_states", hidden_states, dtypes=dtypes, shape=(None, None), layout="[T, H]", device=device)
    if hidden.dtype != E4M3:
        check_unscaled("hidden_scales", hidden_scales, "hidden_states", hidden.dtype)
    if not quantised:
        check_width("hidden_states.size(1)", hidden.shape[1])
        return readable("hidden_states", hidden), None
    tokens, width = hidden.shape[0], check_scaled_width("hidden_states.size(1)", hidden.shape[1])
    scales = None
    if hidden.dtype == E4M3:
        scales = check_scales("hidden_scales", hidden_scales, "hidden_states", shape=(tokens, width // SCALE_BLOCK),
                              layout="[T, H/128]", device=device)
    return readable("hidden_states", hidden), scales


def check_ids(topk_ids: Any, topk_weights: Any, tokens: int | None, num_experts: int,
              device: torch.device) -> tuple[Tensor, Tensor | None]:
    """Routing of `tokens` tokens (None: any number) with any k; weights may be None (all ones)."""
    check_count("num_experts", num_experts)
    known = isinstance(topk_ids, Tensor) and topk_ids.dim() == 2
    if known:
        check_count("topk_ids.size(1)", topk_ids.shape[1], most=min(MAX_TOP_K, num_experts))
    given = topk_weights
    if known and topk_weights is None:
        given = torch.empty(1, device=topk_ids.device).expand(topk_ids.shape)
    count = topk_ids.shape[0] if known and tokens is None else tokens
    top_k = topk_ids.shape[1] if known else None
    ids, weights = check_routing_tensors(topk_ids, given, num_tokens=count, top_k=top_k, device=device)
    return ids.contiguous(), None if topk_weights is None else weights.contiguous()


def check_first(w13: Any, w13_scales: Any, *, hidden: int, local: int, device: torch.device) -> tuple[Tensor, Tensor | None]:
    """(w13, its scales or None): bfloat16 [E_local, 2I, H] with gate rows first, or e4m3 as scaled_weights makes it."""
    dtypes = (E4M3,) if is_e4m3(w13) else BF16
    check_tensor("w13", w13, dtypes=dtypes, shape=(local, None, hidden), layout="[E_local, 2I, H]", device=device)
    if w13.dtype != E4M3:
        check_unscaled("w13_scales", w13_scales, "w13", w13.dtype)
        if w13.shape[1] % 16 or w13.shape[1] == 0:
            raise ArgumentError(f"w13 has {w13.shape[1]} rows per expert, wanted gate rows, then up rows, and a multiple of 16 on "
                                "CUDA: pad I to a multiple of 8 with zeros")
        return readable("w13", w13), None
    check_multiple("w13.size(1)", w13.shape[1], 2 * SCALE_BLOCK, WHY_MULTIPLE)
    shape = (local, w13.shape[1] // SCALE_BLOCK, hidden // SCALE_BLOCK, 2)
    return readable("w13", w13), check_scales("w13_scales", w13_scales, "w13", shape=shape, layout="[E_local, 2I/128, H/128, 2]",
                                              device=device)


def check_second(w2: Any, w2_scales: Any, *, quantised: bool, hidden: int | None, inter: int, local: int,
                 device: torch.device) -> tuple[Tensor, Tensor | None]:
    """(w2 [E_local, H, I], its scale pairs or None), of the dtype that the call has."""
    dtypes = (E4M3,) if quantised else BF16
    check_tensor("w2", w2, dtypes=dtypes, shape=(local, hidden, inter), layout="[E_local, H, I]", device=device)
    if not quantised:
        check_unscaled("w2_scales", w2_scales, "w2", w2.dtype)
        check_width("w2.size(1)", w2.shape[1])
        check_width("w2.size(2)", w2.shape[2])
        return readable("w2", w2), None
    check_scaled_width("w2.size(1)", w2.shape[1])
    check_scaled_width("w2.size(2)", w2.shape[2])
    shape = (local, w2.shape[1] // SCALE_BLOCK, w2.shape[2] // SCALE_BLOCK, 2)
    return readable("w2", w2), check_scales("w2_scales", w2_scales, "w2", shape=shape, layout="[E_local, H/128, I/128, 2]",
                                            device=device)


def check_activated(activated: Any, activated_scales: Any, device: torch.device) -> tuple[Tensor, Tensor | None]:
    """(activated [rows, I], its scales [I / 128, rows] or None)."""
    dtypes = (E4M3,) if is_e4m3(activated) else BF16
    rows = check_tensor("activated", activated, dtypes=dtypes, shape=(None, None), layout="[rows, I]", device=device)
    if rows.dtype != E4M3:
        check_unscaled("activated_scales", activated_scales, "activated", rows.dtype)
        return readable("activated", rows), None
    blocks = check_scaled_width("activated.size(1)", rows.shape[1]) // SCALE_BLOCK
    if rows.shape[0] % 4:
        raise ArgumentError(f"activated has {rows.shape[0]} rows, wanted a multiple of 4 in e4m3 (scales are loaded in units of 16 "
                            "bytes): the output of dispatch_gemm")
    scales = check_scales("activated_scales", activated_scales, "activated", shape=(blocks, rows.shape[0]), layout="[I/128, rows]",
                          device=device)
    return readable("activated", rows), scales


def check_stride(tokens: int, tokens_per_rank: int | None) -> int:
    """Row stride of the tables. None: T of this rank, which all must have."""
    if tokens_per_rank is None:
        return tokens
    check_count("tokens_per_rank", tokens_per_rank, least=0)
    if tokens > tokens_per_rank:
        raise ArgumentError(f"this rank has {tokens} tokens, more than tokens_per_rank={tokens_per_rank}; wanted at least {tokens}")
    return tokens_per_rank
