"""The ops on CUDA tensors: bfloat16 over NVLink. Checks, one workspace, launches on the current stream; nothing waits on the host.

A call that some rank refuses, or that differs between ranks, is computed by none: its result is NaN, and the next op of the
group (or moe_tk.ops.synchronize) raises. See moe_tk.ops for arguments and results.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_tk.arguments import as_contiguous, check_routing_tensors, check_tensor
from moe_tk.errors import ArgumentError
from moe_tk.group import RankGroup
from moe_tk.memory.nvlink_layout import MAX_TOP_K
from moe_tk.memory.nvlink_ops_layout import DenseGeometry, RoutedOpsGeometry
from moe_tk.ops.cuda_sessions import checked, one_call
from moe_tk.ops.sizes import WEIGHT_POSITIONS, check_divides, routed_row_block, routed_rows
from moe_tk.planner import variant_index
from moe_tk.runtime.calls import signature_of
from moe_tk.runtime.launch import Activation, resolve_activation
from moe_tk.runtime.nvlink_layer import one_limit
from moe_tk.runtime.nvlink_ops import DENSE_RUN, DENSE_SEAL, OPEN, ROUTED_GATHER, ROUTED_HAND_OUT, ROUTED_SCATTER
from moe_tk.schedule import local_experts
from moe_tk.sizes import check_count, check_one_of, check_width

BF16 = (torch.bfloat16,)


def _readable(name: str, value: Tensor) -> Tensor:
    """`value` with rows one after the other, at an address that bulk copies can read."""
    value = as_contiguous(name, value)
    return value if value.data_ptr() % 16 == 0 else value.clone()


def ag_gemm(x: Tensor, weight: Tensor, group: RankGroup, timeout_s: float | None) -> Tensor:
    """all_gather(x) @ weight.T: [world * T, N]. H and N are multiples of 8."""
    with one_call("ag_gemm", group, x.device, timeout_s) as (ops, seconds):

        def check() -> tuple[Tensor, Tensor]:
            rows = check_tensor("x", x, dtypes=BF16, shape=(None, None), layout="[T, H]", device=x.device)
            check_width("x.size(1)", rows.shape[1])
            w = check_tensor("weight", weight, dtypes=BF16, shape=(None, rows.shape[1]), layout="[N, H]", device=x.device)
            check_width("weight.size(0)", w.shape[0])
            return _readable("x", rows), _readable("weight", w)

        rows, w = checked("ag_gemm", ops, seconds, check)
        tokens, hidden = rows.shape
        session = ops.session("ag_gemm", DenseGeometry(world=group.world, rank=group.rank, max_tokens=max(1, tokens), width=hidden,
                                                       columns=w.shape[0], gathers=True), timeout_s=seconds)
        out = rows.new_empty(group.world * tokens, w.shape[0])
        session.call(rows, w, out, num_tokens=tokens, signature=signature_of("ag_gemm", "cuda", tokens, hidden),
                     stages=OPEN | DENSE_RUN | DENSE_SEAL, timeout_s=seconds, stream=ops.stream())
    return out


def gemm_rs(x: Tensor, weight: Tensor, group: RankGroup, timeout_s: float | None) -> Tensor:
    """reduce_scatter(x @ weight.T): [M / world, N]. K and N are multiples of 8. Partial rows travel in bfloat16."""
    with one_call("gemm_rs", group, x.device, timeout_s) as (ops, seconds):

        def check() -> tuple[Tensor, Tensor]:
            rows = check_tensor("x", x, dtypes=BF16, shape=(None, None), layout="[M, K]", device=x.device)
            check_width("x.size(1)", rows.shape[1])
            w = check_tensor("weight", weight, dtypes=BF16, shape=(None, rows.shape[1]), layout="[N, K]", device=x.device)
            check_width("weight.size(0)", w.shape[0])
            check_divides(rows.shape[0], group.world)
            return _readable("x", rows), _readable("weight", w)

        rows, w = checked("gemm_rs", ops, seconds, check)
        tokens, columns = rows.shape[0] // group.world, w.shape[0]
        session = ops.session("gemm_rs", DenseGeometry(world=group.world, rank=group.rank, max_tokens=max(1, tokens), width=columns,
                                                       columns=columns, gathers=False), timeout_s=seconds)
        out = rows.new_empty(tokens, columns)
        session.call(rows, w, out, num_tokens=tokens, signature=signature_of("gemm_rs", "cuda", tokens, columns),
                     stages=OPEN | DENSE_RUN, timeout_s=seconds, stream=ops.stream())
    return out


def _check_hidden(hidden_states: Any, device: torch.device) -> Tensor:
    hidden = check_tensor("hidden_states", hidden_states, dtypes=BF16, shape=(None, None), layout="[T, H]", device=device)
    check_width("hidden_states.size(1)", hidden.shape[1])
    return _readable("hidden_states", hidden)


def _check_ids(topk_ids: Any, topk_weights: Any, tokens: int | None, num_experts: int,
               device: torch.device) -> tuple[Tensor, Tensor | None]:
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


def _check_first(w13: Any, *, hidden: int, local: int, device: torch.device) -> Tensor:
    check_tensor("w13", w13, dtypes=BF16, shape=(local, None, hidden), layout="[E_local, 2I, H]", device=device)
    if w13.shape[1] % 16 or w13.shape[1] == 0:
        raise ArgumentError(f"w13 has {w13.shape[1]} rows per expert, wanted gate rows, then up rows, and a multiple of 16 on "
                            "CUDA: pad I to a multiple of 8 with zeros")
    return _readable("w13", w13)


def _check_second(w2: Any, *, hidden: int | None, inter: int, local: int, device: torch.device) -> Tensor:
    check_tensor("w2", w2, dtypes=BF16, shape=(local, hidden, inter), layout="[E_local, H, I]", device=device)
    check_width("w2.size(1)", w2.shape[1])
    check_width("w2.size(2)", w2.shape[2])
    return _readable("w2", w2)


def _check_stride(tokens: int, tokens_per_rank: int | None) -> int:
    """Row stride of the tables. None: T of this rank, which all must have."""
    if tokens_per_rank is None:
        return tokens
    check_count("tokens_per_rank", tokens_per_rank, least=0)
    if tokens > tokens_per_rank:
        raise ArgumentError(f"this rank has {tokens} tokens, more than tokens_per_rank={tokens_per_rank}; wanted at least {tokens}")
    return tokens_per_rank


class _Routed:
    """What the routed ops have in common: sizes, one session, fields of a call."""

    def __init__(self, op: str, group: RankGroup, *, hidden: int, inter: int, ids: Tensor, num_experts: int, mode: str, stride: int,
                 equal: tuple) -> None:
        self.op, self.group, self.stride, self.top_k, self.inter = op, group, stride, ids.shape[1], inter
        self.num_experts, self.mode = num_experts, mode
        self.geometry = RoutedOpsGeometry(world=group.world, rank=group.rank, max_tokens=max(1, stride), top_k=self.top_k,
                                          num_experts=num_experts, hidden=hidden, intermediate_size=0, mode=mode, max_segments=1,
                                          width=inter)
        self.row_block = routed_row_block(True, world=group.world, tokens_per_rank=stride, top_k=self.top_k,
                                                     num_experts=num_experts)
        # With tokens_per_rank the ranks' T may differ and the stride is part of `equal`; else the stride is T.
        self.signature = signature_of(op, "cuda", hidden, self.top_k, num_experts, mode, stride, *equal)

    @property
    def rows(self) -> int:
        """Rows of a tensor in slot order."""
        return routed_rows(world=self.group.world, rank=self.group.rank, tokens_per_rank=self.stride, top_k=self.top_k,
                                      num_experts=self.num_experts, mode=self.mode, row_block=self.row_block)

    def fields(self, session: Any, ids: Tensor, weights: Tensor | None, **more: Any) -> dict[str, Any]:
        """Fields of a call; weights None: all ones."""
        weights = session.ones if weights is None else weights
        return {"topk_ids": ids, "topk_weights": weights, "ids_are_64": ids.dtype == torch.int64,
                "weights_are_bf16": weights.dtype == torch.bfloat16, "variant": variant_index("bfloat16", self.row_block),
                "signature": self.signature, "num_tokens": ids.shape[0], **more}


def _matrix(session: Any, weight: Tensor) -> Tensor:
    """A rank without experts computes nothing, but a descriptor wants an address."""
    return weight if weight.numel() else session.workspace.local("slot_rows", torch.bfloat16)


def _act_fields(form: Activation) -> dict[str, float]:
    return {"alpha": form.alpha, "beta": form.beta, "limit": one_limit(form)}


def dispatch_gemm(hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor | None, w13: Tensor, *, num_experts: int, mode: str,
                  tokens_per_rank: int | None, activation: str | Activation, swiglu_limit: float | None, group: RankGroup,
                  timeout_s: float | None) -> tuple[Tensor, Tensor, Tensor]:
    """(activated [rows, I] in slot order, zero where no pair is; expert_offsets; slots). Row blocks have 64 or 128 slots,
    by the sizes that all ranks know."""
    with one_call("dispatch_gemm", group, hidden_states.device, timeout_s) as (ops, seconds):
        device = hidden_states.device

        def check() -> tuple:
            hidden = _check_hidden(hidden_states, device)
            ids, weights = _check_ids(topk_ids, topk_weights, hidden.shape[0], num_experts, device)
            local = local_experts(num_experts, group.world, group.rank, mode)[1]
            first = _check_first(w13, hidden=hidden.shape[1], local=local, device=device)
            form = resolve_activation(activation, swiglu_limit)
            act = _act_fields(form)
            routed = _Routed("dispatch_gemm", group, hidden=hidden.shape[1], inter=first.shape[1] // 2, ids=ids,
                             num_experts=num_experts, mode=mode, stride=_check_stride(hidden.shape[0], tokens_per_rank),
                             equal=(form, weights is None))
            return hidden, ids, weights, first, act, routed

        hidden, ids, weights, first, act, routed = checked("dispatch_gemm", ops, seconds, check)
        session = ops.session("dispatch_gemm", routed.geometry, timeout_s=seconds)
        activated = hidden.new_empty(routed.rows, routed.inter)
        offsets = torch.empty(first.shape[0] + 1, dtype=torch.int32, device=device)
        slots = torch.empty(group.world * routed.stride, ids.shape[1], dtype=torch.int32, device=device)
        session.call(routed.fields(session, ids, weights, hidden_states=hidden, w13=_matrix(session, first), activated=activated,
                                   expert_offsets=offsets, slots_out=slots, rows=routed.rows, stride=routed.stride,
                                   weights_before_l2=weights is not None, **act),
                     stages=OPEN | ROUTED_GATHER | ROUTED_HAND_OUT, timeout_s=seconds, stream=ops.stream())
    return activated, offsets, slots


def gemm_combine(activated: Tensor, topk_ids: Tensor, topk_weights: Tensor | None, w2: Tensor, *, num_experts: int, mode: str,
                 tokens_per_rank: int | None, group: RankGroup, timeout_s: float | None) -> Tensor:
    """Each token's weighted sum of Linear 2 over its choices, [T, H]."""
    with one_call("gemm_combine", group, activated.device, timeout_s) as (ops, seconds):
        device = activated.device

        def check() -> tuple:
            rows = check_tensor("activated", activated, dtypes=BF16, shape=(None, None), layout="[rows, I]", device=device)
            ids, weights = _check_ids(topk_ids, topk_weights, None, num_experts, device)
            local = local_experts(num_experts, group.world, group.rank, mode)[1]
            second = _check_second(w2, hidden=None, inter=rows.shape[1], local=local, device=device)
            routed = _Routed("gemm_combine", group, hidden=second.shape[1], inter=rows.shape[1], ids=ids, num_experts=num_experts,
                             mode=mode, stride=_check_stride(ids.shape[0], tokens_per_rank), equal=(weights is None,))
            if rows.shape[0] < routed.rows:
                raise ArgumentError(f"activated has {rows.shape[0]} rows, wanted at least {routed.rows}: the output of "
                                    "dispatch_gemm")
            return _readable("activated", rows), ids, weights, second, routed

        rows, ids, weights, second, routed = checked("gemm_combine", ops, seconds, check)
        session = ops.session("gemm_combine", routed.geometry, timeout_s=seconds)
        out = rows.new_empty(ids.shape[0], second.shape[1])
        session.call(routed.fields(session, ids, weights, activated=rows, w2=_matrix(session, second), out=out,
                                   weights_before_l2=False), stages=OPEN | ROUTED_SCATTER, timeout_s=seconds, stream=ops.stream())
    return out


def mega_moe(hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor, w13: Tensor, w2: Tensor, *, num_experts: int, mode: str,
             activation: str | Activation, swiglu_limit: float | None, weight_position: str, group: RankGroup,
             timeout_s: float | None, tokens_per_rank: int | None) -> Tensor:
    """The whole layer, [T, H], in three launches, on weights as they are given: nothing is converted or kept."""
    with one_call("mega_moe", group, hidden_states.device, timeout_s) as (ops, seconds):
        device = hidden_states.device

        def check() -> tuple:
            check_one_of("weight_position", weight_position, WEIGHT_POSITIONS)
            hidden = _check_hidden(hidden_states, device)
            ids, weights = _check_ids(topk_ids, topk_weights, hidden.shape[0], num_experts, device)
            local = local_experts(num_experts, group.world, group.rank, mode)[1]
            first = _check_first(w13, hidden=hidden.shape[1], local=local, device=device)
            second = _check_second(w2, hidden=hidden.shape[1], inter=first.shape[1] // 2, local=local, device=device)
            form = resolve_activation(activation, swiglu_limit)
            act = _act_fields(form)
            routed = _Routed("mega_moe", group, hidden=hidden.shape[1], inter=second.shape[2], ids=ids, num_experts=num_experts,
                             mode=mode, stride=_check_stride(hidden.shape[0], tokens_per_rank),
                             equal=(form, weight_position, weights is None))
            return hidden, ids, weights, first, second, act, routed

        hidden, ids, weights, first, second, act, routed = checked("mega_moe", ops, seconds, check)
        session = ops.session("mega_moe", routed.geometry, timeout_s=seconds)
        between = hidden.new_empty(routed.rows, routed.inter)
        out = torch.empty_like(hidden)
        session.call(routed.fields(session, ids, weights, hidden_states=hidden, w13=_matrix(session, first), activated=between,
                                   w2=_matrix(session, second), out=out, weights_before_l2=weight_position == "before_l2", **act),
                     stages=OPEN | ROUTED_GATHER | ROUTED_SCATTER, timeout_s=seconds, stream=ops.stream())
    return out
