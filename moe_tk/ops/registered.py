"""torch.ops.moe_tk.*: schemas, fake kernels and ordered effects, so that torch.compile neither looks inside, nor drops,
nor reorders a call. Groups travel by name; "" is this process alone."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.library import EffectType, _register_effectful_op, custom_op

from moe_tk.errors import ArgumentError
from moe_tk.group import SINGLE, RankGroup, resolve_group
from moe_tk.ops import functional
from moe_tk.ops.handles import find_layer
from moe_tk.ops.sizes import routed_row_block, routed_rows
from moe_tk.schedule import local_experts
from moe_tk.weights.gemm import SCALE_BLOCK
from moe_tk.weights.scaled import E4M3


def group_by_name(name: str) -> RankGroup:
    """RankGroup of a process group's name."""
    if name in ("", SINGLE.name):
        return SINGLE
    return resolve_group(torch.distributed.distributed_c10d._resolve_process_group(name))


@custom_op("moe_tk::moe_layer", mutates_args=())
def moe_layer(hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor, layer: int) -> Tensor:
    """A call of the MoELayer with this handle."""
    return find_layer(layer).forward_into(hidden_states, topk_ids, topk_weights)


@moe_layer.register_fake
def _(hidden_states, topk_ids, topk_weights, layer):
    return torch.empty_like(hidden_states, memory_format=torch.contiguous_format)


@custom_op("moe_tk::ag_gemm", mutates_args=())
def ag_gemm(x: Tensor, weight: Tensor, group: str, timeout_s: float | None = None, x_scales: Tensor | None = None,
            weight_scales: Tensor | None = None) -> Tensor:
    """functional.ag_gemm"""
    return functional.ag_gemm(x, weight, group_by_name(group), timeout_s, x_scales, weight_scales)


@ag_gemm.register_fake
def _(x, weight, group, timeout_s=None, x_scales=None, weight_scales=None):
    return x.new_empty(group_by_name(group).world * x.shape[0], weight.shape[0], dtype=_result_dtype(x))


@custom_op("moe_tk::gemm_rs", mutates_args=())
def gemm_rs(x: Tensor, weight: Tensor, group: str, timeout_s: float | None = None, x_scales: Tensor | None = None,
            weight_scales: Tensor | None = None) -> Tensor:
    """functional.gemm_rs"""
    return functional.gemm_rs(x, weight, group_by_name(group), timeout_s, x_scales, weight_scales)


@gemm_rs.register_fake
def _(x, weight, group, timeout_s=None, x_scales=None, weight_scales=None):
    return x.new_empty(x.shape[0] // group_by_name(group).world, weight.shape[0], dtype=_result_dtype(x))


@custom_op("moe_tk::dispatch_gemm", mutates_args=())
def dispatch_gemm(hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor | None, w13: Tensor, num_experts: int, mode: str,
                  tokens_per_rank: int | None, activation: str, swiglu_limit: float | None, group: str,
                  timeout_s: float | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """functional.dispatch_gemm of a call without scales"""
    return functional.dispatch_gemm(hidden_states, topk_ids, topk_weights, w13, num_experts=num_experts, mode=mode,
                                    tokens_per_rank=tokens_per_rank, activation=activation, swiglu_limit=swiglu_limit,
                                    group=group_by_name(group), timeout_s=timeout_s)


@dispatch_gemm.register_fake
def _(hidden_states, topk_ids, topk_weights, w13, num_experts, mode, tokens_per_rank, activation, swiglu_limit, group,
      timeout_s=None):
    return _fake_dispatch(hidden_states, topk_ids, w13, num_experts, mode, tokens_per_rank, group)


def _fake_dispatch(hidden_states, topk_ids, w13, num_experts, mode, tokens_per_rank, group):
    ranks = group_by_name(group)
    stride = hidden_states.shape[0] if tokens_per_rank is None else tokens_per_rank
    row_block = routed_row_block(hidden_states.is_cuda, world=ranks.world, tokens_per_rank=stride,
                                            top_k=topk_ids.shape[1], num_experts=num_experts)
    rows = routed_rows(world=ranks.world, rank=ranks.rank, tokens_per_rank=stride, top_k=topk_ids.shape[1],
                                  num_experts=num_experts, mode=mode, row_block=row_block)
    _, local = local_experts(num_experts, ranks.world, ranks.rank, mode)
    return (w13.new_empty(rows, w13.shape[1] // 2), topk_ids.new_empty(local + 1, dtype=torch.int32),
            topk_ids.new_empty(ranks.world * stride, topk_ids.shape[1], dtype=torch.int32))


@custom_op("moe_tk::dispatch_gemm_scaled", mutates_args=())
def dispatch_gemm_scaled(hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor | None, w13: Tensor, num_experts: int,
                         mode: str, tokens_per_rank: int | None, activation: str, swiglu_limit: float | None, group: str,
                         timeout_s: float | None = None, w13_scales: Tensor | None = None,
                         hidden_scales: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """functional.dispatch_gemm in e4m3, whose results are four: the number of a torch op's is fixed"""
    results = functional.dispatch_gemm(hidden_states, topk_ids, topk_weights, w13, num_experts=num_experts, mode=mode,
                                       tokens_per_rank=tokens_per_rank, activation=activation, swiglu_limit=swiglu_limit,
                                       group=group_by_name(group), timeout_s=timeout_s, w13_scales=w13_scales,
                                       hidden_scales=hidden_scales)
    if len(results) != 4:
        raise ArgumentError(f"dispatch_gemm_scaled: w13 is {w13.dtype}, wanted float8_e4m3fn; others are for dispatch_gemm")
    return results


@dispatch_gemm_scaled.register_fake
def _(hidden_states, topk_ids, topk_weights, w13, num_experts, mode, tokens_per_rank, activation, swiglu_limit, group,
      timeout_s=None, w13_scales=None, hidden_scales=None):
    activated, *tables = _fake_dispatch(hidden_states, topk_ids, w13, num_experts, mode, tokens_per_rank, group)
    return activated, *tables, activated.new_empty(activated.shape[1] // SCALE_BLOCK, activated.shape[0], dtype=torch.float32)


@custom_op("moe_tk::gemm_combine", mutates_args=())
def gemm_combine(activated: Tensor, topk_ids: Tensor, topk_weights: Tensor | None, w2: Tensor, num_experts: int, mode: str,
                 tokens_per_rank: int | None, group: str, timeout_s: float | None = None, activated_scales: Tensor | None = None,
                 w2_scales: Tensor | None = None) -> Tensor:
    """functional.gemm_combine"""
    return functional.gemm_combine(activated, topk_ids, topk_weights, w2, num_experts=num_experts, mode=mode,
                                   tokens_per_rank=tokens_per_rank, group=group_by_name(group), timeout_s=timeout_s,
                                   activated_scales=activated_scales, w2_scales=w2_scales)


@gemm_combine.register_fake
def _(activated, topk_ids, topk_weights, w2, num_experts, mode, tokens_per_rank, group, timeout_s=None, activated_scales=None,
      w2_scales=None):
    return activated.new_empty(topk_ids.shape[0], w2.shape[1], dtype=_result_dtype(activated))


def _result_dtype(rows):
    """e4m3 rows give bfloat16 results, others their own kind."""
    return torch.bfloat16 if rows.dtype == E4M3 else rows.dtype


@custom_op("moe_tk::mega_moe", mutates_args=())
def mega_moe(hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor, w13: Tensor, w2: Tensor, num_experts: int, mode: str,
             activation: str, swiglu_limit: float | None, weight_position: str, group: str,
             timeout_s: float | None = None, tokens_per_rank: int | None = None, w13_scales: Tensor | None = None,
             w2_scales: Tensor | None = None, hidden_scales: Tensor | None = None) -> Tensor:
    """functional.mega_moe"""
    return functional.mega_moe(hidden_states, topk_ids, topk_weights, w13, w2, num_experts=num_experts, mode=mode,
                               activation=activation, swiglu_limit=swiglu_limit, weight_position=weight_position,
                               group=group_by_name(group), timeout_s=timeout_s, tokens_per_rank=tokens_per_rank,
                               w13_scales=w13_scales, w2_scales=w2_scales, hidden_scales=hidden_scales)


@mega_moe.register_fake
def _(hidden_states, topk_ids, topk_weights, w13, w2, num_experts, mode, activation, swiglu_limit, weight_position, group,
      timeout_s=None, tokens_per_rank=None, w13_scales=None, w2_scales=None, hidden_scales=None):
    return torch.empty_like(hidden_states, memory_format=torch.contiguous_format, dtype=_result_dtype(hidden_states))


OPS = (moe_layer, ag_gemm, gemm_rs, dispatch_gemm, dispatch_gemm_scaled, gemm_combine, mega_moe)
for _op in OPS:  # a call waits for other ranks: the order of calls is part of their meaning
    _register_effectful_op(_op._opoverload, EffectType.ORDERED)
