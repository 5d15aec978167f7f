"""torch.ops.moe_tk.*: schemas, fake kernels and ordered effects, so that torch.compile neither looks inside, nor drops,
nor reorders a call. Groups travel by name; "" is this process alone."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.library import EffectType, _register_effectful_op, custom_op

from moe_tk.group import SINGLE, RankGroup, resolve_group
from moe_tk.ops import functional
from moe_tk.ops.handles import find_layer
from moe_tk.ops.sizes import routed_row_block, routed_rows
from moe_tk.schedule import local_experts


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
def ag_gemm(x: Tensor, weight: Tensor, group: str, timeout_s: float | None = None) -> Tensor:
    """functional.ag_gemm"""
    return functional.ag_gemm(x, weight, group_by_name(group), timeout_s)


@ag_gemm.register_fake
def _(x, weight, group, timeout_s=None):
    return x.new_empty(group_by_name(group).world * x.shape[0], weight.shape[0])


@custom_op("moe_tk::gemm_rs", mutates_args=())
def gemm_rs(x: Tensor, weight: Tensor, group: str, timeout_s: float | None = None) -> Tensor:
    """functional.gemm_rs"""
    return functional.gemm_rs(x, weight, group_by_name(group), timeout_s)


@gemm_rs.register_fake
def _(x, weight, group, timeout_s=None):
    return x.new_empty(x.shape[0] // group_by_name(group).world, weight.shape[0])


@custom_op("moe_tk::dispatch_gemm", mutates_args=())
def dispatch_gemm(hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor | None, w13: Tensor, num_experts: int, mode: str,
                  tokens_per_rank: int | None, activation: str, swiglu_limit: float | None, group: str,
                  timeout_s: float | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """functional.dispatch_gemm"""
    return functional.dispatch_gemm(hidden_states, topk_ids, topk_weights, w13, num_experts=num_experts, mode=mode,
                                    tokens_per_rank=tokens_per_rank, activation=activation, swiglu_limit=swiglu_limit,
                                    group=group_by_name(group), timeout_s=timeout_s)


@dispatch_gemm.register_fake
def _(hidden_states, topk_ids, topk_weights, w13, num_experts, mode, tokens_per_rank, activation, swiglu_limit, group,
      timeout_s=None):
    ranks = group_by_name(group)
    stride = hidden_states.shape[0] if tokens_per_rank is None else tokens_per_rank
    row_block = routed_row_block(hidden_states.is_cuda, world=ranks.world, tokens_per_rank=stride,
                                            top_k=topk_ids.shape[1], num_experts=num_experts)
    rows = routed_rows(world=ranks.world, rank=ranks.rank, tokens_per_rank=stride, top_k=topk_ids.shape[1],
                                  num_experts=num_experts, mode=mode, row_block=row_block)
    _, local = local_experts(num_experts, ranks.world, ranks.rank, mode)
    return (hidden_states.new_empty(rows, w13.shape[1] // 2), topk_ids.new_empty(local + 1, dtype=torch.int32),
            topk_ids.new_empty(ranks.world * stride, topk_ids.shape[1], dtype=torch.int32))


@custom_op("moe_tk::gemm_combine", mutates_args=())
def gemm_combine(activated: Tensor, topk_ids: Tensor, topk_weights: Tensor | None, w2: Tensor, num_experts: int, mode: str,
                 tokens_per_rank: int | None, group: str, timeout_s: float | None = None) -> Tensor:
    """functional.gemm_combine"""
    return functional.gemm_combine(activated, topk_ids, topk_weights, w2, num_experts=num_experts, mode=mode,
                                   tokens_per_rank=tokens_per_rank, group=group_by_name(group), timeout_s=timeout_s)


@gemm_combine.register_fake
def _(activated, topk_ids, topk_weights, w2, num_experts, mode, tokens_per_rank, group, timeout_s=None):
    return activated.new_empty(topk_ids.shape[0], w2.shape[1])


@custom_op("moe_tk::mega_moe", mutates_args=())
def mega_moe(hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor, w13: Tensor, w2: Tensor, num_experts: int, mode: str,
             activation: str, swiglu_limit: float | None, weight_position: str, group: str,
             timeout_s: float | None = None, tokens_per_rank: int | None = None) -> Tensor:
    """functional.mega_moe"""
    return functional.mega_moe(hidden_states, topk_ids, topk_weights, w13, w2, num_experts=num_experts, mode=mode,
                               activation=activation, swiglu_limit=swiglu_limit, weight_position=weight_position,
                               group=group_by_name(group), timeout_s=timeout_s, tokens_per_rank=tokens_per_rank)


@mega_moe.register_fake
def _(hidden_states, topk_ids, topk_weights, w13, w2, num_experts, mode, activation, swiglu_limit, weight_position, group,
      timeout_s=None, tokens_per_rank=None):
    return torch.empty_like(hidden_states, memory_format=torch.contiguous_format)


OPS = (moe_layer, ag_gemm, gemm_rs, dispatch_gemm, gemm_combine, mega_moe)
for _op in OPS:  # a call waits for other ranks: the order of calls is part of their meaning
    _register_effectful_op(_op._opoverload, EffectType.ORDERED)
