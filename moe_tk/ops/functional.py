"""The ops in eager form: checks, agreement of the ranks, one call. moe_tk.ops.registered makes torch ops of them."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from moe_tk.arguments import COMPUTE_DTYPES, as_contiguous, check_routing, check_tensor
from moe_tk.errors import ArgumentError
from moe_tk.group import RankGroup
from moe_tk.memory.estimate import layer_geometry
from moe_tk.memory.geometry import Geometry
from moe_tk.ops.sessions import Agreement, Request, agree, data_session
from moe_tk.ops.sizes import WEIGHT_POSITIONS, check_divides, routed_row_block, routed_rows
from moe_tk.planner import Plan, make_plan
from moe_tk.planner.plan import ROW_BLOCK
from moe_tk.runtime.calls import CallOptions, open_routed_call, run_gather, run_mega, run_scatter
from moe_tk.runtime.launch import Activation, resolve_activation
from moe_tk.runtime.session import Session
from moe_tk.schedule import local_experts
from moe_tk.sizes import MAX_TOP_K, check_count, check_one_of, check_width
from moe_tk.weights.scaled import E4M3

__all__ = ["ROW_BLOCK", "ag_gemm", "dispatch_gemm", "gemm_combine", "gemm_rs", "mega_moe", "resolve_activation", "routed_row_block",
           "routed_rows"]


def _cuda_ops(first: Any) -> Any:
    """The module of the ops on CUDA tensors if `first` is one, else None. Loaded only where it is wanted."""
    if not (isinstance(first, Tensor) and first.is_cuda):
        return None
    from moe_tk.ops import cuda_functional

    return cuda_functional


def _check_unquantised(**given: Any) -> None:
    """Raises ArgumentError when something is of a call in e4m3, which the CPU back end does not have."""
    for name, value in given.items():
        if value is not None and (name.endswith("_scales") or (isinstance(value, Tensor) and value.dtype == E4M3)):
            what = "are given" if name.endswith("_scales") else "is float8_e4m3fn"
            raise ArgumentError(f"{name} {what}, but the CPU back end computes in bfloat16 and float32: e4m3 wants tensors on GPUs "
                                "joined by NVLink")


def _plan(group: RankGroup, tokens: int) -> Plan:
    return make_plan(pattern="mega", protocol="auto", max_tokens=max(tokens, 1), cores=os.cpu_count() or 1, world=group.world)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _equal_tokens(op: str, counts: list[int], remedy: str) -> None:
    """Raises on all ranks alike: they hold the same counts."""
    if len(set(counts)) > 1:
        raise ArgumentError(f"{op}: ranks have {', '.join(map(str, counts))} rows, wanted the same number on all: {remedy}")


def _dense_session(group: RankGroup, agreement: Agreement, *, hidden: int, columns: int, dtype: torch.dtype,
                   gathers: bool) -> Session:
    """One expert that every rank wants all rows of: the dense patterns are this case of the same kernels."""

    def make(most: int) -> Geometry:
        return Geometry(world=group.world, max_tokens=most, top_k=1, num_experts=1, num_local_experts=1,
                        hidden=hidden if gathers else 8, intermediate=columns if gathers else hidden,
                        out_width=0 if gathers else columns, dtype=_name(dtype), mode="tp", gathers=gathers, scatters=not gathers)

    return data_session(group, make, agreement, agreement.tokens[0])


def ag_gemm(x: Tensor, weight: Tensor, group: RankGroup, timeout_s: float | None, x_scales: Tensor | None = None,
            weight_scales: Tensor | None = None) -> Tensor:
    """all_gather(x) @ weight.T: x [T, H] of this rank, weight [N, H] of this rank; returns [world * T, N]. T equal on all ranks."""
    if (cuda := _cuda_ops(x)) is not None:
        return cuda.ag_gemm(x, weight, group, timeout_s, x_scales, weight_scales)

    def check() -> Request:
        _check_unquantised(x=x, weight=weight, x_scales=x_scales, weight_scales=weight_scales)
        rows = check_tensor("x", x, dtypes=COMPUTE_DTYPES, shape=(None, None), layout="[T, H]")
        check_width("x.size(1)", rows.shape[1])
        w = check_tensor("weight", weight, dtypes=(rows.dtype,), shape=(None, rows.shape[1]), layout="[N, H]")
        check_count("weight.size(0)", w.shape[0])
        return Request(rows.shape[0], w.shape[0], (rows.shape[1], _name(rows.dtype)),
                       (as_contiguous("x", rows), as_contiguous("weight", w)))

    agreement = agree(group, "ag_gemm", check, timeout_s=timeout_s)
    _equal_tokens("ag_gemm", agreement.tokens, "pad x to the largest")
    rows, w = agreement.tensors
    tokens = rows.shape[0]
    out = rows.new_empty(group.world * tokens, w.shape[0])
    session = _dense_session(group, agreement, hidden=rows.shape[1], columns=w.shape[0], dtype=rows.dtype, gathers=True)
    options = CallOptions(op="ag_gemm", plan=_plan(group, tokens), timeout_s=agreement.timeout_s)
    with session.one_call("ag_gemm"):
        call = open_routed_call(session, options, topk_ids=rows.new_zeros(tokens, 1, dtype=torch.int32), topk_weights=None,
                                signature=agreement.signature, num_experts=1, segments=1)
        run_gather(call, rows, w, out, gated=False)
    return out


def gemm_rs(x: Tensor, weight: Tensor, group: RankGroup, timeout_s: float | None, x_scales: Tensor | None = None,
            weight_scales: Tensor | None = None) -> Tensor:
    """reduce_scatter(x @ weight.T): x [M, K] and weight [N, K] of this rank's part of K; returns rows of this rank, [M / world, N].

    M is equal on all ranks and a multiple of world; K may differ.
    """
    if (cuda := _cuda_ops(x)) is not None:
        return cuda.gemm_rs(x, weight, group, timeout_s, x_scales, weight_scales)

    def check() -> Request:
        _check_unquantised(x=x, weight=weight, x_scales=x_scales, weight_scales=weight_scales)
        rows = check_tensor("x", x, dtypes=COMPUTE_DTYPES, shape=(None, None), layout="[M, K]")
        check_count("x.size(1)", rows.shape[1])
        w = check_tensor("weight", weight, dtypes=(rows.dtype,), shape=(None, rows.shape[1]), layout="[N, K]")
        check_width("weight.size(0)", w.shape[0])
        check_divides(rows.shape[0], group.world)
        return Request(rows.shape[0] // group.world, rows.shape[1], (w.shape[0], _name(rows.dtype)),
                       (as_contiguous("x", rows), as_contiguous("weight", w)))

    agreement = agree(group, "gemm_rs", check, timeout_s=timeout_s)
    _equal_tokens("gemm_rs", [count * group.world for count in agreement.tokens], "every rank holds all M rows of its part of K")
    rows, w = agreement.tensors
    tokens = agreement.tokens[group.rank]
    out = rows.new_empty(tokens, w.shape[0])
    session = _dense_session(group, agreement, hidden=rows.shape[1], columns=w.shape[0], dtype=rows.dtype, gathers=False)
    options = CallOptions(op="gemm_rs", plan=_plan(group, tokens), timeout_s=agreement.timeout_s)
    with session.one_call("gemm_rs"):
        call = open_routed_call(session, options, topk_ids=rows.new_zeros(tokens, 1, dtype=torch.int32), topk_weights=None,
                                signature=agreement.signature, num_experts=1, segments=1)
        run_scatter(call, rows, w, out)
    return out


def _routed_session(group: RankGroup, agreement: Agreement, *, hidden: int, intermediate: int, top_k: int, num_experts: int,
                    mode: str, dtype: torch.dtype, most_tokens: int, plan: Plan, segments: int, side: str) -> Session:
    _, local = local_experts(num_experts, group.world, group.rank, mode)

    def make(most: int) -> Geometry:
        whole = layer_geometry(world=group.world, rank=group.rank, num_experts=num_experts, top_k=top_k, hidden_size=hidden,
                               intermediate_size=intermediate, max_tokens_per_rank=most, mode="ep", pattern="mega",
                               dtype=_name(dtype), row_block=plan.row_block, segments=segments, job_chunk=plan.job_chunk)
        return replace(whole, mode=mode, num_local_experts=local, gathers=side != "scatter", scatters=side != "gather",
                       out_width=0 if side == "gather" else hidden, ring_segments=whole.ring_segments if side == "both" else 0)

    return data_session(group, make, agreement, most_tokens)


def _check_hidden(hidden_states: Any) -> Tensor:
    hidden = check_tensor("hidden_states", hidden_states, dtypes=COMPUTE_DTYPES, shape=(None, None), layout="[T, H]")
    check_width("hidden_states.size(1)", hidden.shape[1])
    return as_contiguous("hidden_states", hidden)


def _check_ids(topk_ids: Any, topk_weights: Any, tokens: int | None, num_experts: int,
               group: RankGroup) -> tuple[Tensor, Tensor | None]:
    """Routing of `tokens` tokens (None: any number) with any k; weights may be None (all ones)."""
    check_count("num_experts", num_experts)
    known = isinstance(topk_ids, Tensor) and topk_ids.dim() == 2
    if known:
        check_count("topk_ids.size(1)", topk_ids.shape[1], most=min(MAX_TOP_K, num_experts))
    given = torch.ones(topk_ids.shape, dtype=torch.float32, device="cpu") if known and topk_weights is None else topk_weights
    ids, weights = check_routing(topk_ids, given, num_tokens=tokens, top_k=topk_ids.shape[1] if known else None,
                                 num_experts=num_experts, rank=group.rank)
    return ids, None if topk_weights is None else weights


def _check_first(w13: Any, *, dtype: torch.dtype, hidden: int, num_experts: int, mode: str, group: RankGroup) -> Tensor:
    _, local = local_experts(num_experts, group.world, group.rank, mode)
    check_tensor("w13", w13, dtypes=(dtype,), shape=(local, None, hidden), layout="[E_local, 2I, H]")
    if w13.shape[1] % 2 or w13.shape[1] == 0:
        raise ArgumentError(f"w13 has {w13.shape[1]} rows per expert, wanted an even number >= 2: gate rows, then up rows")
    return as_contiguous("w13", w13)


def _check_second(w2: Any, *, dtype: torch.dtype, hidden: int | None, inter: int, num_experts: int, mode: str,
                  group: RankGroup) -> Tensor:
    _, local = local_experts(num_experts, group.world, group.rank, mode)
    check_tensor("w2", w2, dtypes=(dtype,), shape=(local, hidden, inter), layout="[E_local, H, I]")
    check_width("w2.size(1)", w2.shape[1])
    return as_contiguous("w2", w2)


def _stride(op: str, counts: list[int], tokens_per_rank: int | None) -> int:
    """Row stride of the tables of dispatch_gemm and gemm_combine, or the error on all ranks."""
    if tokens_per_rank is None:
        _equal_tokens(op, counts, f"or pass tokens_per_rank={max(counts)} on all ranks")
        return counts[0]
    if max(counts) > tokens_per_rank:
        raise ArgumentError(f"{op}: ranks have {', '.join(map(str, counts))} tokens, more than tokens_per_rank={tokens_per_rank}; "
                            f"wanted at least {max(counts)}")
    return tokens_per_rank


def dispatch_gemm(hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor | None, w13: Tensor, *, num_experts: int, mode: str,
                  tokens_per_rank: int | None, activation: str | Activation, swiglu_limit: float | None, group: RankGroup,
                  timeout_s: float | None, w13_scales: Tensor | None = None,
                  hidden_scales: Tensor | None = None) -> tuple[Tensor, ...]:
    """Gathers the rows that this rank's experts want and runs Linear 1 with its activation on them.

    Returns (activated [rows, I] in slot order, zero where no pair is; expert_offsets [E_local + 1]; slots [world * T, k]; in
    e4m3, which only CUDA has, activated_scales [I / 128, rows]).
    topk_weights given: they multiply the activation (weight_position "before_l2").
    """
    if (cuda := _cuda_ops(hidden_states)) is not None:
        return cuda.dispatch_gemm(hidden_states, topk_ids, topk_weights, w13, num_experts=num_experts, mode=mode,
                                  tokens_per_rank=tokens_per_rank, activation=activation, swiglu_limit=swiglu_limit, group=group,
                                  timeout_s=timeout_s, w13_scales=w13_scales, hidden_scales=hidden_scales)

    def check() -> Request:
        _check_unquantised(hidden_states=hidden_states, w13=w13, w13_scales=w13_scales, hidden_scales=hidden_scales)
        hidden = _check_hidden(hidden_states)
        ids, weights = _check_ids(topk_ids, topk_weights, hidden.shape[0], num_experts, group)
        first = _check_first(w13, dtype=hidden.dtype, hidden=hidden.shape[1], num_experts=num_experts, mode=mode, group=group)
        if tokens_per_rank is not None:
            check_count("tokens_per_rank", tokens_per_rank, least=0)
        form = resolve_activation(activation, swiglu_limit)
        shape = (hidden.shape[1], ids.shape[1], _name(hidden.dtype), num_experts, mode, tokens_per_rank, form, weights is None)
        return Request(hidden.shape[0], first.shape[1] // 2, shape, (hidden, ids, weights, first, form))

    agreement = agree(group, "dispatch_gemm", check, timeout_s=timeout_s)
    stride = _stride("dispatch_gemm", agreement.tokens, tokens_per_rank)
    hidden, ids, weights, first, form = agreement.tensors
    plan = _plan(group, stride)
    session = _routed_session(group, agreement, hidden=hidden.shape[1], intermediate=first.shape[1] // 2, top_k=ids.shape[1],
                              num_experts=num_experts, mode=mode, dtype=hidden.dtype, most_tokens=stride, plan=plan, segments=1,
                              side="gather")
    rows = routed_rows(world=group.world, rank=group.rank, tokens_per_rank=stride, top_k=ids.shape[1], num_experts=num_experts,
                       mode=mode, row_block=plan.row_block)
    out = hidden.new_zeros(rows, first.shape[1] // 2)
    options = CallOptions(op="dispatch_gemm", plan=plan, timeout_s=agreement.timeout_s, activation=form,
                          weights_before_l2=weights is not None)
    with session.one_call("dispatch_gemm"):
        call = open_routed_call(session, options, topk_ids=ids, topk_weights=weights, signature=agreement.signature,
                                num_experts=num_experts, segments=1, tokens_per_rank=stride)
        run_gather(call, hidden, first, out, gated=True)
    return out, call.tables.expert_offsets, call.tables.slots


def gemm_combine(activated: Tensor, topk_ids: Tensor, topk_weights: Tensor | None, w2: Tensor, *, num_experts: int, mode: str,
                 tokens_per_rank: int | None, group: RankGroup, timeout_s: float | None, activated_scales: Tensor | None = None,
                 w2_scales: Tensor | None = None) -> Tensor:
    """Linear 2 on rows in the slot order of the same routing, then each token's weighted sum back to its rank: [T, H].

    topk_weights given: they multiply the experts' outputs (weight_position "combine").
    """
    if (cuda := _cuda_ops(activated)) is not None:
        return cuda.gemm_combine(activated, topk_ids, topk_weights, w2, num_experts=num_experts, mode=mode,
                                 tokens_per_rank=tokens_per_rank, group=group, timeout_s=timeout_s,
                                 activated_scales=activated_scales, w2_scales=w2_scales)

    def check() -> Request:
        _check_unquantised(activated=activated, w2=w2, activated_scales=activated_scales, w2_scales=w2_scales)
        rows = check_tensor("activated", activated, dtypes=COMPUTE_DTYPES, shape=(None, None), layout="[rows, I]")
        check_count("activated.size(1)", rows.shape[1])
        ids, weights = _check_ids(topk_ids, topk_weights, None, num_experts, group)
        second = _check_second(w2, dtype=rows.dtype, hidden=None, inter=rows.shape[1], num_experts=num_experts, mode=mode,
                               group=group)
        stride = ids.shape[0] if tokens_per_rank is None else check_count("tokens_per_rank", tokens_per_rank, least=0)
        wanted = routed_rows(world=group.world, rank=group.rank, tokens_per_rank=stride, top_k=ids.shape[1],
                             num_experts=num_experts, mode=mode, row_block=ROW_BLOCK)
        if rows.shape[0] < wanted:
            raise ArgumentError(f"activated has {rows.shape[0]} rows, wanted at least {wanted}: the output of dispatch_gemm")
        shape = (second.shape[1], ids.shape[1], _name(rows.dtype), num_experts, mode, tokens_per_rank, weights is None)
        return Request(ids.shape[0], rows.shape[1], shape, (as_contiguous("activated", rows), ids, weights, second))

    agreement = agree(group, "gemm_combine", check, timeout_s=timeout_s)
    stride = _stride("gemm_combine", agreement.tokens, tokens_per_rank)
    rows, ids, weights, second = agreement.tensors
    plan = _plan(group, stride)
    session = _routed_session(group, agreement, hidden=second.shape[1], intermediate=rows.shape[1], top_k=ids.shape[1],
                              num_experts=num_experts, mode=mode, dtype=rows.dtype, most_tokens=stride, plan=plan, segments=1,
                              side="scatter")
    out = rows.new_empty(ids.shape[0], second.shape[1])
    options = CallOptions(op="gemm_combine", plan=plan, timeout_s=agreement.timeout_s, weights_before_l2=False)
    with session.one_call("gemm_combine"):
        call = open_routed_call(session, options, topk_ids=ids, topk_weights=weights, signature=agreement.signature,
                                num_experts=num_experts, segments=1, tokens_per_rank=stride)
        run_scatter(call, rows, second, out)
    return out


def mega_moe(hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor, w13: Tensor, w2: Tensor, *, num_experts: int, mode: str,
             activation: str | Activation, swiglu_limit: float | None, weight_position: str, group: RankGroup,
             timeout_s: float | None, tokens_per_rank: int | None = None, w13_scales: Tensor | None = None,
             w2_scales: Tensor | None = None, hidden_scales: Tensor | None = None) -> Tensor:
    """The whole layer in one launch: [T, H]. T may differ from rank to rank; tokens_per_rank is a bound on it (CUDA wants one)."""
    if (cuda := _cuda_ops(hidden_states)) is not None:
        return cuda.mega_moe(hidden_states, topk_ids, topk_weights, w13, w2, num_experts=num_experts, mode=mode,
                             activation=activation, swiglu_limit=swiglu_limit, weight_position=weight_position, group=group,
                             timeout_s=timeout_s, tokens_per_rank=tokens_per_rank, w13_scales=w13_scales, w2_scales=w2_scales,
                             hidden_scales=hidden_scales)

    def check() -> Request:
        _check_unquantised(hidden_states=hidden_states, w13=w13, w2=w2, w13_scales=w13_scales, w2_scales=w2_scales,
                           hidden_scales=hidden_scales)
        check_one_of("weight_position", weight_position, WEIGHT_POSITIONS)
        hidden = _check_hidden(hidden_states)
        if tokens_per_rank is not None and hidden.shape[0] > check_count("tokens_per_rank", tokens_per_rank, least=0):
            raise ArgumentError(f"this rank has {hidden.shape[0]} tokens, more than tokens_per_rank={tokens_per_rank}")
        ids, weights = _check_ids(topk_ids, topk_weights, hidden.shape[0], num_experts, group)
        first = _check_first(w13, dtype=hidden.dtype, hidden=hidden.shape[1], num_experts=num_experts, mode=mode, group=group)
        second = _check_second(w2, dtype=hidden.dtype, hidden=hidden.shape[1], inter=first.shape[1] // 2, num_experts=num_experts,
                               mode=mode, group=group)
        form = resolve_activation(activation, swiglu_limit)
        shape = (hidden.shape[1], ids.shape[1], _name(hidden.dtype), num_experts, mode, form, weight_position, weights is None)
        return Request(hidden.shape[0], second.shape[2], shape, (hidden, ids, weights, first, second, form))

    agreement = agree(group, "mega_moe", check, timeout_s=timeout_s)
    hidden, ids, weights, first, second, form = agreement.tensors
    most = max(agreement.tokens)
    plan = _plan(group, most)
    session = _routed_session(group, agreement, hidden=hidden.shape[1], intermediate=second.shape[2], top_k=ids.shape[1],
                              num_experts=num_experts, mode=mode, dtype=hidden.dtype, most_tokens=most, plan=plan,
                              segments=plan.segments, side="both")
    out = hidden.new_empty(hidden.shape)
    options = CallOptions(op="mega_moe", plan=plan, timeout_s=agreement.timeout_s, activation=form,
                          weights_before_l2=weight_position == "before_l2")
    with session.one_call("mega_moe"):
        call = open_routed_call(session, options, topk_ids=ids, topk_weights=weights, signature=agreement.signature,
                                num_experts=num_experts, segments=plan.segments)
        run_mega(call, hidden, first, second, out)
    return out
