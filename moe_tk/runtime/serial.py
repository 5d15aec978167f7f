"""The serial path: plain collectives, then both GEMMs, then collectives again. The comparison for every fused pattern."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from moe_tk.reference import activate
from moe_tk.runtime.calls import OpenCall
from moe_tk.runtime.host import dtype_code, host_module


def grouped_gemm(rows: Tensor, weights: Tensor, offsets: list[int], row_block: int, *, float_out: bool = False) -> Tensor:
    """out[s] = rows[s] @ weights[group of s].T by the host engine. rows [S, K], weights [G, N, K], offsets G + 1; out [S, N].

    float_out  the sums as they are accumulated, in float32, not rounded to the type of the rows
    """
    out = rows.new_empty(rows.shape[0], weights.shape[1], dtype=torch.float32 if float_out else rows.dtype)
    host_module().grouped_gemm(dtype=dtype_code(rows.dtype), a=rows.data_ptr(), weights=weights.data_ptr(), out=out.data_ptr(),
                               offsets=offsets, depth=rows.shape[1], columns=weights.shape[1], row_block=row_block,
                               float_out=float_out)
    return out


def _all_gather_rows(call: OpenCall, tokens: Tensor) -> Tensor:
    """[R * T, H] rows of all ranks at the row stride of the tables; rows past a rank's count are zero."""
    group, tables = call.session.group, call.tables
    padded = tokens.new_zeros(tables.tokens_per_rank, tokens.shape[1])
    padded[:tokens.shape[0]] = tokens
    if group.world == 1:
        return padded
    parts = [torch.empty_like(padded) for _ in range(group.world)]
    group.wait(lambda: dist.all_gather(parts, padded, group=group.process_group, async_op=True),
               timeout_s=call.options.timeout_s, step=f"{call.options.op} (serial): all_gather of the rows")
    return torch.cat(parts)


def _return_partials(call: OpenCall, partial: Tensor) -> Tensor:
    """Sends each source rank its partial rows: [R * T, H] here in, [R, T, H] from all ranks out."""
    group, tables = call.session.group, call.tables
    if group.world == 1:
        return partial.view(1, tables.tokens_per_rank, -1)
    planes = torch.empty_like(partial)
    group.wait(lambda: dist.all_to_all_single(planes, partial, group=group.process_group, async_op=True),
               timeout_s=call.options.timeout_s, step=f"{call.options.op} (serial): all_to_all of the partial rows")
    return planes.view(group.world, tables.tokens_per_rank, -1)


def run_serial(call: OpenCall, tokens: Tensor, w13: Tensor, w2: Tensor, out: Tensor) -> None:
    """The layer without fusion; shapes as in run_two_kernel. Sums in the same order as the fused patterns."""
    tables, options = call.tables, call.options
    rows = _all_gather_rows(call, tokens)
    pair = tables.slot_pair.long()
    used = pair >= 0
    gathered = torch.where(used[:, None], rows[pair.clamp(min=0) // tables.top_k], 0)
    # Groups of a slot range are (segment, expert); the weights of an expert serve all segments.
    offsets = tables.expert_offsets.tolist()
    inter = w2.shape[2]
    activated = tokens.new_empty(tables.num_slots, inter)
    expert_out = tokens.new_empty(tables.num_slots, w2.shape[1])
    weight = None if call.pair_weights is None else call.pair_weights.view(-1)[pair.clamp(min=0)][:, None]
    form = options.activation
    experts = max(tables.num_local_experts, 1)
    for segment in range(tables.segments if tables.num_local_experts else 0):
        part = offsets[segment * experts:(segment + 1) * experts + 1]
        first, last = part[0], part[-1]
        local = [o - first for o in part]
        both = grouped_gemm(gathered[first:last], w13, local, tables.row_block, float_out=True)  # as the fused epilogue has them
        act = activate(both[:, :inter], both[:, inter:], alpha=form.alpha, beta=form.beta, gate_limit=form.gate_limit,
                       up_limit=form.up_limit)
        if weight is not None and options.weights_before_l2:
            act = act * weight[first:last]
        activated[first:last] = act.to(tokens.dtype)
        expert_out[first:last] = grouped_gemm(activated[first:last], w2, local, tables.row_block)
    partial = tokens.new_zeros(tables.world * tables.tokens_per_rank, w2.shape[1], dtype=torch.float32)
    for choice in range(tables.top_k):
        slot = tables.slots[:, choice].long()
        value = expert_out[slot.clamp(min=0)].float() if tables.num_slots else torch.zeros_like(partial)
        if call.pair_weights is not None and not options.weights_before_l2:
            value = value * call.pair_weights[:, choice, None]
        partial += torch.where(slot[:, None] >= 0, value, 0)
    planes = _return_partials(call, partial.to(tokens.dtype))
    total = tokens.new_zeros(call.num_tokens, w2.shape[1], dtype=torch.float32)
    for source in range(tables.world):
        owes = (tables.contributors[:call.num_tokens] >> source & 1).bool()
        total += torch.where(owes[:, None], planes[source, :call.num_tokens].float(), 0)
    out.copy_(total.to(out.dtype))
    call.session.native.finish()
