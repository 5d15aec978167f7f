"""The ops in eager form: checks, agreement of the ranks, one call. moe_tk.ops.registered makes torch ops of them."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from moe_tk.arguments import COMPUTE_DTYPES, as_contiguous, check_routing, check_tensor, check_width
from moe_tk.config import env
from moe_tk.errors import ArgumentError
from moe_tk.group import RankGroup
from moe_tk.memory.estimate import layer_geometry
from moe_tk.memory.geometry import Geometry
from moe_tk.ops.sessions import agree, data_session
from moe_tk.planner import Plan, make_plan
from moe_tk.planner.plan import ROW_BLOCK
from moe_tk.runtime.calls import (
    CallOptions,
    open_routed_call,
    run_gather,
    run_mega,
    run_scatter,
    signature_of,
)
from moe_tk.runtime.launch import Activation, resolve_activation
from moe_tk.schedule import local_experts

__all__ = ["ROW_BLOCK", "ag_gemm", "dispatch_gemm", "gemm_combine", "gemm_rs", "mega_moe", "resolve_activation", "routed_rows"]


def _plan(group: RankGroup, tokens: int) -> Plan:
    return make_plan(pattern="mega", protocol="auto", max_tokens=max(tokens, 1), cores=os.cpu_count() or 1, world=group.world)


def _checked(check: Callable[[], Any]) -> tuple[Any, ArgumentError | None]:
    """(result, None) or (None, the error): a rank with bad arguments still has to tell the others."""
    try:
        return check(), None
    except ArgumentError as error:
        return None, error


def _dense_geometry(group: RankGroup, *, max_tokens: int, hidden: int, columns: int, dtype: torch.dtype, gathers: bool) -> Geometry:
    """One expert that every rank wants all rows of: the dense patterns are this case of the same kernels."""
    return Geometry(world=group.world, max_tokens=max_tokens, top_k=1, num_experts=1, num_local_experts=1, hidden=hidden if gathers else 8,
                    intermediate=columns if gathers else hidden, out_width=0 if gathers else columns,
                    dtype=str(dtype).removeprefix("torch."), mode="tp", gathers=gathers, scatters=not gathers)


def _equal_tokens(op: str, counts: list[int], remedy: str) -> None:
    """Raises on all ranks alike: they hold the same counts."""
    if len(set(counts)) > 1:
        raise ArgumentError(f"{op}: ranks have {', '.join(map(str, counts))} rows, wanted the same number on all: {remedy}")


def ag_gemm(x: Tensor, weight: Tensor, group: RankGroup, timeout_s: float | None) -> Tensor:
    """all_gather(x) @ weight.T: x [T, H] of this rank, weight [N, H] of this rank; returns [world * T, N]. T equal on all ranks."""
    timeout_s = timeout_s or env("MOE_TK_TIMEOUT_S")

    def check() -> tuple[Tensor, Tensor]:
        rows = check_tensor("x", x, dtypes=COMPUTE_DTYPES, shape=(None, None), layout="[T, H]")
        check_width("x.size(1)", rows.shape[1])
        w = check_tensor("weight", weight, dtypes=(rows.dtype,), shape=(None, rows.shape[1]), layout="[N, H]")
        return as_contiguous("x", rows), as_contiguous("weight", w)

    checked, problem = _checked(check)
    tokens = checked[0].shape[0] if checked else 0
    shape = (checked[0].shape[1], str(checked[0].dtype)) if checked else ()
    counts = agree(group, "ag_gemm", tokens, signature_of("ag_gemm", shape), timeout_s=timeout_s, problem=problem)
    _equal_tokens("ag_gemm", counts, "pad x to the largest")
    rows, w = checked
    columns = w.shape[0]
    out = torch.empty(group.world * tokens, columns, dtype=rows.dtype)
    session = data_session(group, lambda most: _dense_geometry(group, max_tokens=most, hidden=rows.shape[1], columns=columns,
                                                               dtype=rows.dtype, gathers=True), tokens)
    options = CallOptions(op="ag_gemm", plan=_plan(group, tokens), timeout_s=timeout_s)
    with session.one_call("ag_gemm"):
        call = open_routed_call(session, options, topk_ids=torch.zeros(tokens, 1, dtype=torch.int32), topk_weights=None,
                                signature=signature_of("ag_gemm", shape), num_experts=1, segments=1)
        run_gather(call, rows, w, out, gated=False)
    return out


def gemm_rs(x: Tensor, weight: Tensor, group: RankGroup, timeout_s: float | None) -> Tensor:
    """reduce_scatter(x @ weight.T): x [M, K] and weight [N, K] of this rank's part of K; returns rows of this rank, [M / world, N].

    M is equal on all ranks and a multiple of world; K may differ.
    """
    timeout_s = timeout_s or env("MOE_TK_TIMEOUT_S")

    def check() -> tuple[Tensor, Tensor]:
        rows = check_tensor("x", x, dtypes=COMPUTE_DTYPES, shape=(None, None), layout="[M, K]")
        w = check_tensor("weight", weight, dtypes=(rows.dtype,), shape=(None, rows.shape[1]), layout="[N, K]")
        check_width("weight.size(0)", w.shape[0])
        if rows.shape[0] % group.world:
            below = rows.shape[0] // group.world * group.world
            raise ArgumentError(f"x has {rows.shape[0]} rows, wanted a multiple of world={group.world}; the nearest valid numbers are "
                                f"{below} and {below + group.world}")
        return as_contiguous("x", rows), as_contiguous("weight", w)

    checked, problem = _checked(check)
    tokens = checked[0].shape[0] // group.world if checked else 0
    shape = (checked[1].shape[0], str(checked[0].dtype)) if checked else ()
    counts = agree(group, "gemm_rs", tokens, signature_of("gemm_rs", shape), timeout_s=timeout_s, problem=problem)
    _equal_tokens("gemm_rs", [count * group.world for count in counts], "every rank holds all M rows of its part of K")
    rows, w = checked
    out = torch.empty(tokens, w.shape[0], dtype=rows.dtype)
    session = data_session(group, lambda most: _dense_geometry(group, max_tokens=most, hidden=rows.shape[1], columns=w.shape[0],
                                                               dtype=rows.dtype, gathers=False), tokens)
    options = CallOptions(op="gemm_rs", plan=_plan(group, tokens), timeout_s=timeout_s)
    with session.one_call("gemm_rs"):
        call = open_routed_call(session, options, topk_ids=torch.zeros(tokens, 1, dtype=torch.int32), topk_weights=None,
                                signature=signature_of("gemm_rs", shape), num_experts=1, segments=1)
        run_scatter(call, rows, w, out)
    return out


def routed_rows(*, world: int, rank: int, tokens_per_rank: int, top_k: int, num_experts: int, mode: str, row_block: int) -> int:
    """Rows of the slot-ordered buffers of dispatch_gemm and gemm_combine, enough for any routing: all pairs may be here, and
    each local expert may leave one row block part empty. Also right for symbolic sizes (fake kernels)."""
    _, local = local_experts(num_experts, world, rank, mode)
    return (-(-(world * tokens_per_rank * top_k) // row_block) + local) * row_block


def _routed_session(group: RankGroup, *, hidden: int, intermediate: int, top_k: int, num_experts: int, mode: str, dtype: torch.dtype,
                    most_tokens: int, plan: Plan, segments: int, side: str) -> Any:
    _, local = local_experts(num_experts, group.world, group.rank, mode)

    def make(most: int) -> Geometry:
        whole = layer_geometry(world=group.world, rank=group.rank, num_experts=num_experts, top_k=top_k, hidden_size=hidden,
                               intermediate_size=intermediate, max_tokens_per_rank=most, mode="ep", pattern="mega",
                               dtype=str(dtype).removeprefix("torch."), row_block=plan.row_block, segments=segments,
                               job_chunk=plan.job_chunk)
        return replace(whole, mode=mode, num_local_experts=local, gathers=side != "scatter", scatters=side != "gather",
                       out_width=0 if side == "gather" else hidden, ring_segments=whole.ring_segments if side == "both" else 0)

    return data_session(group, make, most_tokens)


def _check_weight_pair(w13: Any, w2: Any, *, dtype: torch.dtype, hidden: int, num_experts: int, mode: str, group: RankGroup) -> tuple:
    """(w13, w2) with one of them None where an op takes only one; shapes [E_local, 2I, H] and [E_local, H, I]."""
    _, local = local_experts(num_experts, group.world, group.rank, mode)
    if w13 is not None:
        check_tensor("w13", w13, dtypes=(dtype,), shape=(local, None, hidden), layout="[E_local, 2I, H]")
        if w13.shape[1] % 2 or w13.shape[1] == 0:
            raise ArgumentError(f"w13 has {w13.shape[1]} rows per expert, wanted an even number: gate rows, then up rows")
        w13 = as_contiguous("w13", w13)
    if w2 is not None:
        inter = None if w13 is None else w13.shape[1] // 2
        w2 = as_contiguous("w2", check_tensor("w2", w2, dtypes=(dtype,), shape=(local, hidden, inter), layout="[E_local, H, I]"))
    return w13, w2


def dispatch_gemm(hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor | None, w13: Tensor, *, num_experts: int, mode: str,
                  tokens_per_rank: int | None, activation: Activation, group: RankGroup,
                  timeout_s: float | None) -> tuple[Tensor, Tensor, Tensor]:
    """Gathers the rows that this rank's experts want and runs Linear 1 with its activation on them.

    Returns (activated [rows, I] in slot order, zero where no pair is; expert_offsets [E_local + 1]; slots [world * T, k]).
    topk_weights given: they multiply the activation (weight_position "before_l2").
    """
    timeout_s = timeout_s or env("MOE_TK_TIMEOUT_S")

    def check() -> tuple:
        hidden = check_tensor("hidden_states", hidden_states, dtypes=COMPUTE_DTYPES, shape=(None, None), layout="[T, H]")
        check_width("hidden_states.size(1)", hidden.shape[1])
        ids, weights = _check_ids(topk_ids, topk_weights, hidden.shape[0], num_experts, group)
        first, _ = _check_weight_pair(w13, None, dtype=hidden.dtype, hidden=hidden.shape[1], num_experts=num_experts, mode=mode, group=group)
        return as_contiguous("hidden_states", hidden), ids, weights, first

    checked, problem = _checked(check)
    stride, shape = _agree_routed(group, "dispatch_gemm", checked, tokens_per_rank, (num_experts, mode, activation), timeout_s, problem)
    hidden, ids, weights, first = checked
    plan = _plan(group, stride)
    inter = first.shape[1] // 2
    session = _routed_session(group, hidden=hidden.shape[1], intermediate=inter, top_k=ids.shape[1], num_experts=num_experts, mode=mode,
                              dtype=hidden.dtype, most_tokens=stride, plan=plan, segments=1, side="gather")
    rows = routed_rows(world=group.world, rank=group.rank, tokens_per_rank=stride, top_k=ids.shape[1], num_experts=num_experts,
                       mode=mode, row_block=plan.row_block)
    out = torch.zeros(rows, inter, dtype=hidden.dtype)
    options = CallOptions(op="dispatch_gemm", plan=plan, timeout_s=timeout_s, activation=activation, weights_before_l2=weights is not None)
    with session.one_call("dispatch_gemm"):
        call = open_routed_call(session, options, topk_ids=ids, topk_weights=weights, signature=shape, num_experts=num_experts,
                                segments=1, tokens_per_rank=stride)
        run_gather(call, hidden, first, out, gated=True)
    return out, call.tables.expert_offsets, call.tables.slots


def gemm_combine(activated: Tensor, topk_ids: Tensor, topk_weights: Tensor | None, w2: Tensor, *, num_experts: int, mode: str,
                 tokens_per_rank: int | None, group: RankGroup, timeout_s: float | None) -> Tensor:
    """Linear 2 on rows in the slot order of the same routing, then each token's weighted sum back to its rank: [T, H].

    topk_weights given: they multiply the experts' outputs (weight_position "combine").
    """
    timeout_s = timeout_s or env("MOE_TK_TIMEOUT_S")

    def check() -> tuple:
        rows = check_tensor("activated", activated, dtypes=COMPUTE_DTYPES, shape=(None, None), layout="[rows, I]")
        if not isinstance(topk_ids, Tensor) or topk_ids.dim() != 2:
            raise ArgumentError("topk_ids must be a tensor [T, k]")
        ids, weights = _check_ids(topk_ids, topk_weights, topk_ids.shape[0], num_experts, group)
        _, local = local_experts(num_experts, group.world, group.rank, mode)
        second = check_tensor("w2", w2, dtypes=(rows.dtype,), shape=(local, None, rows.shape[1]), layout="[E_local, H, I]")
        check_width("w2.size(1)", second.shape[1])
        return as_contiguous("activated", rows), ids, weights, as_contiguous("w2", second)

    checked, problem = _checked(check)
    if checked and tokens_per_rank is not None:
        wanted = routed_rows(world=group.world, rank=group.rank, tokens_per_rank=tokens_per_rank, top_k=checked[1].shape[1],
                             num_experts=num_experts, mode=mode, row_block=_plan(group, tokens_per_rank).row_block)
        if checked[0].shape[0] < wanted:
            problem = ArgumentError(f"activated has {checked[0].shape[0]} rows, wanted at least {wanted}: the output of dispatch_gemm")
    width = checked[3].shape[1] if checked else 0
    stride, shape = _agree_routed(group, "gemm_combine", checked, tokens_per_rank, (num_experts, mode, width), timeout_s, problem)
    rows, ids, weights, second = checked
    plan = _plan(group, stride)
    session = _routed_session(group, hidden=width, intermediate=rows.shape[1], top_k=ids.shape[1], num_experts=num_experts, mode=mode,
                              dtype=rows.dtype, most_tokens=stride, plan=plan, segments=1, side="scatter")
    out = torch.empty(ids.shape[0], width, dtype=rows.dtype)
    options = CallOptions(op="gemm_combine", plan=plan, timeout_s=timeout_s, weights_before_l2=False)
    with session.one_call("gemm_combine"):
        call = open_routed_call(session, options, topk_ids=ids, topk_weights=weights, signature=shape, num_experts=num_experts,
                                segments=1, tokens_per_rank=stride)
        if rows.shape[0] < call.tables.num_slots:
            raise ArgumentError(f"activated has {rows.shape[0]} rows, but this routing has {call.tables.num_slots} slots here")
        run_scatter(call, rows, second, out)
    return out


def mega_moe(hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor, w13: Tensor, w2: Tensor, *, num_experts: int, mode: str,
             activation: Activation, weights_before_l2: bool, group: RankGroup, timeout_s: float | None) -> Tensor:
    """The whole layer in one launch: [T, H]. T may differ from rank to rank."""
    timeout_s = timeout_s or env("MOE_TK_TIMEOUT_S")

    def check() -> tuple:
        hidden = check_tensor("hidden_states", hidden_states, dtypes=COMPUTE_DTYPES, shape=(None, None), layout="[T, H]")
        check_width("hidden_states.size(1)", hidden.shape[1])
        ids, weights = _check_ids(topk_ids, topk_weights, hidden.shape[0], num_experts, group)
        first, second = _check_weight_pair(w13, w2, dtype=hidden.dtype, hidden=hidden.shape[1], num_experts=num_experts, mode=mode,
                                           group=group)
        return as_contiguous("hidden_states", hidden), ids, weights, first, second

    checked, problem = _checked(check)
    tokens, top_k = (checked[1].shape if checked else (0, 0))
    shape = signature_of("mega_moe", top_k, checked and checked[0].shape[1], num_experts, mode, activation, weights_before_l2)
    counts = agree(group, "mega_moe", tokens, shape, timeout_s=timeout_s, problem=problem)
    hidden, ids, weights, first, second = checked
    plan = _plan(group, max(counts))
    session = _routed_session(group, hidden=hidden.shape[1], intermediate=second.shape[2], top_k=top_k, num_experts=num_experts, mode=mode,
                              dtype=hidden.dtype, most_tokens=max(counts), plan=plan, segments=plan.segments, side="both")
    out = torch.empty_like(hidden)
    options = CallOptions(op="mega_moe", plan=plan, timeout_s=timeout_s, activation=activation, weights_before_l2=weights_before_l2)
    with session.one_call("mega_moe"):
        call = open_routed_call(session, options, topk_ids=ids, topk_weights=weights, signature=shape, num_experts=num_experts,
                                segments=plan.segments)
        run_mega(call, hidden, first, second, out)
    return out


def _check_ids(topk_ids: Any, topk_weights: Any, tokens: int, num_experts: int, group: RankGroup) -> tuple[Tensor, Tensor | None]:
    """Routing of `tokens` tokens with any k; weights may be None (all ones)."""
    top_k = topk_ids.shape[1] if isinstance(topk_ids, Tensor) and topk_ids.dim() == 2 else None
    given = torch.ones(tokens, top_k or 0) if topk_weights is None else topk_weights
    ids, weights = check_routing(topk_ids, given, num_tokens=tokens, top_k=top_k, num_experts=num_experts, rank=group.rank)
    return ids, None if topk_weights is None else weights


def _agree_routed(group: RankGroup, op: str, checked: tuple | None, tokens_per_rank: int | None, extra: tuple, timeout_s: float,
                  problem: ArgumentError | None) -> tuple[int, int]:
    """(row stride, signature) of a call of dispatch_gemm or gemm_combine, or the error on all ranks."""
    tokens, top_k = checked[1].shape if checked else (0, 0)
    signature = signature_of(op, top_k, tokens_per_rank, *extra)
    counts = agree(group, op, tokens, signature, timeout_s=timeout_s, problem=problem)
    if tokens_per_rank is None:
        _equal_tokens(op, counts, f"or pass tokens_per_rank={max(counts)} on all ranks")
        return counts[0], signature
    if max(counts) > tokens_per_rank:
        raise ArgumentError(f"{op}: ranks have {', '.join(map(str, counts))} tokens, more than tokens_per_rank={tokens_per_rank}; "
                            f"wanted at least {max(counts)}")
    return tokens_per_rank, signature
