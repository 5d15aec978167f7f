"""The ops on CUDA tensors over NVLink. Checks, one workspace, launches on the current stream; nothing waits on the host.

A call that some rank refuses, or that differs between ranks, is computed by none: its result is NaN, and the next op of the
group (or moe_tk.ops.synchronize) raises. See moe_tk.ops for arguments and results.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe_tk.arguments import check_tensor
from moe_tk.errors import ArgumentError
from moe_tk.group import RankGroup
from moe_tk.memory.nvlink_layout import SCALE_BLOCK
from moe_tk.memory.nvlink_ops_layout import DenseGeometry, RoutedOpsGeometry
from moe_tk.ops import cuda_scaled_dense
from moe_tk.ops.cuda_checks import (
    BF16,
    check_activated,
    check_first,
    check_hidden,
    check_ids,
    check_second,
    check_stride,
    check_unscaled,
    is_e4m3,
    readable,
)
from moe_tk.ops.cuda_sessions import checked, one_call
from moe_tk.ops.sizes import WEIGHT_POSITIONS, check_divides, routed_row_block, routed_rows
from moe_tk.planner import variant_index
from moe_tk.runtime.calls import signature_of
from moe_tk.runtime.launch import Activation, resolve_activation
from moe_tk.runtime.nvlink_layer import one_limit
from moe_tk.runtime.nvlink_ops import DENSE_RUN, DENSE_SEAL, OPEN, ROUTED_GATHER, ROUTED_HAND_OUT, ROUTED_SCATTER
from moe_tk.schedule import local_experts
from moe_tk.sizes import check_one_of, check_width
from moe_tk.weights.scaled import E4M3


def ag_gemm(x: Tensor, weight: Tensor, group: RankGroup, timeout_s: float | None, x_scales: Tensor | None,
            weight_scales: Tensor | None) -> Tensor:
    """all_gather(x) @ weight.T: [world * T, N]. H and N are multiples of 8."""
    if is_e4m3(weight):
        return cuda_scaled_dense.ag_gemm(x, weight, group, timeout_s, x_scales, weight_scales)
    with one_call("ag_gemm", group, x.device, timeout_s) as (ops, seconds):

        def check() -> tuple[Tensor, Tensor]:
            rows = check_tensor("x", x, dtypes=BF16, shape=(None, None), layout="[T, H]", device=x.device)
            check_width("x.size(1)", rows.shape[1])
            w = check_tensor("weight", weight, dtypes=BF16, shape=(None, rows.shape[1]), layout="[N, H]", device=x.device)
            check_width("weight.size(0)", w.shape[0])
            check_unscaled("x_scales", x_scales, "x", rows.dtype)
            check_unscaled("weight_scales", weight_scales, "weight", w.dtype)
            return readable("x", rows), readable("weight", w)

        rows, w = checked("ag_gemm", ops, seconds, check)
        tokens, hidden = rows.shape
        session = ops.session("ag_gemm", DenseGeometry(world=group.world, rank=group.rank, max_tokens=max(1, tokens), width=hidden,
                                                       columns=w.shape[0], gathers=True), timeout_s=seconds)
        out = rows.new_empty(group.world * tokens, w.shape[0])
        session.call(rows, w, out, num_tokens=tokens, signature=signature_of("ag_gemm", "cuda", tokens, hidden),
                     stages=OPEN | DENSE_RUN | DENSE_SEAL, timeout_s=seconds, stream=ops.stream())
    return out


def gemm_rs(x: Tensor, weight: Tensor, group: RankGroup, timeout_s: float | None, x_scales: Tensor | None,
            weight_scales: Tensor | None) -> Tensor:
    """reduce_scatter(x @ weight.T): [M / world, N]. K and N are multiples of 8. Partial rows travel in bfloat16."""
    if is_e4m3(weight):
        return cuda_scaled_dense.gemm_rs(x, weight, group, timeout_s, x_scales, weight_scales)
    with one_call("gemm_rs", group, x.device, timeout_s) as (ops, seconds):

        def check() -> tuple[Tensor, Tensor]:
            rows = check_tensor("x", x, dtypes=BF16, shape=(None, None), layout="[M, K]", device=x.device)
            check_width("x.size(1)", rows.shape[1])
            w = check_tensor("weight", weight, dtypes=BF16, shape=(None, rows.shape[1]), layout="[N, K]", device=x.device)
            check_width("weight.size(0)", w.shape[0])
            check_unscaled("x_scales", x_scales, "x", rows.dtype)
            check_unscaled("weight_scales", weight_scales, "weight", w.dtype)
            check_divides(rows.shape[0], group.world)
            return readable("x", rows), readable("weight", w)

        rows, w = checked("gemm_rs", ops, seconds, check)
        tokens, columns = rows.shape[0] // group.world, w.shape[0]
        session = ops.session("gemm_rs", DenseGeometry(world=group.world, rank=group.rank, max_tokens=max(1, tokens), width=columns,
                                                       columns=columns, gathers=False), timeout_s=seconds)
        out = rows.new_empty(tokens, columns)
        session.call(rows, w, out, num_tokens=tokens, signature=signature_of("gemm_rs", "cuda", tokens, columns),
                     stages=OPEN | DENSE_RUN, timeout_s=seconds, stream=ops.stream())
    return out


class _Routed:
    """What the routed ops have in common: sizes, one session, fields of a call."""

    def __init__(self, op: str, group: RankGroup, *, hidden: int, inter: int, ids: Tensor, num_experts: int, mode: str, stride: int,
                 equal: tuple, quantised: bool = False) -> None:
        self.op, self.group, self.stride, self.top_k, self.inter = op, group, stride, ids.shape[1], inter
        self.num_experts, self.mode = num_experts, mode
        self.dtype = "float8_e4m3fn" if quantised else "bfloat16"
        self.geometry = RoutedOpsGeometry(world=group.world, rank=group.rank, max_tokens=max(1, stride), top_k=self.top_k,
                                          num_experts=num_experts, hidden=hidden, intermediate_size=0, mode=mode, max_segments=1,
                                          width=inter, dtype=self.dtype)
        self.row_block = routed_row_block(True, world=group.world, tokens_per_rank=stride, top_k=self.top_k,
                                                     num_experts=num_experts)
        # With tokens_per_rank the ranks' T may differ and the stride is part of `equal`; else the stride is T. In an e4m3 call the
        # hidden states of one rank may be quantised already and another one's not.
        self.signature = signature_of(op, "cuda", self.dtype, hidden, self.top_k, num_experts, mode, stride, *equal)

    @property
    def local(self) -> int:
        """Experts of this rank."""
        return self.geometry.num_local_experts

    @property
    def rows(self) -> int:
        """Rows of a tensor in slot order."""
        return routed_rows(world=self.group.world, rank=self.group.rank, tokens_per_rank=self.stride, top_k=self.top_k,
                                      num_experts=self.num_experts, mode=self.mode, row_block=self.row_block)

    def activation(self, device: torch.device) -> _Activation:
        """New memory for what GEMM 1 leaves, in slot order."""
        if not self.geometry.quantised:
            return _Activation(torch.empty(self.rows, self.inter, dtype=torch.bfloat16, device=device), None)
        return _Activation(torch.empty(self.rows, self.inter, dtype=E4M3, device=device),
                           torch.empty(self.inter // SCALE_BLOCK, self.rows, dtype=torch.float32, device=device))

    def fields(self, session: Any, ids: Tensor, weights: Tensor | None, activation: _Activation, **more: Any) -> dict[str, Any]:
        """Fields of a call; weights None: all ones. Scales that a call does not have are None."""
        weights, bytes_each = session.ones if weights is None else weights, activation.values.element_size()
        fields = {"topk_ids": ids, "topk_weights": weights, "ids_are_64": ids.dtype == torch.int64,
                  "weights_are_bf16": weights.dtype == torch.bfloat16, "variant": variant_index(self.dtype, self.row_block),
                  "signature": self.signature, "num_tokens": ids.shape[0], "activated": activation.values,
                  "activated_scales": activation.scales, "rows": activation.values.shape[0], "row_bytes": self.inter * bytes_each,
                  "scales_stride": 0 if activation.scales is None else activation.scales.shape[1], **more}
        return {name: value for name, value in fields.items() if value is not None}


class _Activation(NamedTuple):
    """Rows between the two GEMMs, in slot order: [rows, I] bfloat16, or e4m3 with float32 scales [I / 128, rows]."""

    values: Tensor
    scales: Tensor | None


def _matrix(session: Any, weight: Tensor) -> Tensor:
    """A rank without experts computes nothing, but a descriptor wants an address."""
    return weight if weight.numel() else session.workspace.local("slot_rows", torch.bfloat16)


def _act_fields(form: Activation) -> dict[str, float]:
    return {"alpha": form.alpha, "beta": form.beta, "limit": one_limit(form)}


def dispatch_gemm(hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor | None, w13: Tensor, *, num_experts: int, mode: str,
                  tokens_per_rank: int | None, activation: str | Activation, swiglu_limit: float | None, group: RankGroup,
                  timeout_s: float | None, w13_scales: Tensor | None, hidden_scales: Tensor | None) -> tuple[Tensor, ...]:
    """(activated [rows, I] in slot order, zero where no pair is; expert_offsets; slots; in e4m3 activated_scales). Row blocks have
    64 or 128 slots, by the sizes that all ranks know."""
    with one_call("dispatch_gemm", group, hidden_states.device, timeout_s) as (ops, seconds):
        device, quantised = hidden_states.device, is_e4m3(w13)

        def check() -> tuple:
            hidden, scales = check_hidden(hidden_states, hidden_scales, quantised=quantised, device=device)
            ids, weights = check_ids(topk_ids, topk_weights, hidden.shape[0], num_experts, device)
            local = local_experts(num_experts, group.world, group.rank, mode)[1]
            first, first_scales = check_first(w13, w13_scales, hidden=hidden.shape[1], local=local, device=device)
            form = resolve_activation(activation, swiglu_limit)
            routed = _Routed("dispatch_gemm", group, hidden=hidden.shape[1], inter=first.shape[1] // 2, ids=ids,
                             num_experts=num_experts, mode=mode, stride=check_stride(hidden.shape[0], tokens_per_rank),
                             equal=(form, weights is None), quantised=quantised)
            given = dict(hidden_states=hidden, hidden_scales=scales, w13_scales=first_scales, **_act_fields(form))
            return routed, ids, weights, first, given

        routed, ids, weights, first, given = checked("dispatch_gemm", ops, seconds, check)
        session = ops.session("dispatch_gemm", routed.geometry, timeout_s=seconds)
        activated = routed.activation(device)
        offsets = torch.empty(routed.local + 1, dtype=torch.int32, device=device)
        slots = torch.empty(group.world * routed.stride, ids.shape[1], dtype=torch.int32, device=device)
        session.call(routed.fields(session, ids, weights, activated, w13=_matrix(session, first), expert_offsets=offsets,
                                   slots_out=slots, stride=routed.stride, weights_before_l2=weights is not None, **given),
                     stages=OPEN | ROUTED_GATHER | ROUTED_HAND_OUT, timeout_s=seconds, stream=ops.stream())
    result = activated.values, offsets, slots
    return result if activated.scales is None else (*result, activated.scales)


def gemm_combine(activated: Tensor, topk_ids: Tensor, topk_weights: Tensor | None, w2: Tensor, *, num_experts: int, mode: str,
                 tokens_per_rank: int | None, group: RankGroup, timeout_s: float | None, activated_scales: Tensor | None,
                 w2_scales: Tensor | None) -> Tensor:
    """Each token's weighted sum of Linear 2 over its choices, [T, H] bfloat16."""
    with one_call("gemm_combine", group, activated.device, timeout_s) as (ops, seconds):
        device, quantised = activated.device, is_e4m3(activated)

        def check() -> tuple:
            rows = _Activation(*check_activated(activated, activated_scales, device))
            ids, weights = check_ids(topk_ids, topk_weights, None, num_experts, device)
            local = local_experts(num_experts, group.world, group.rank, mode)[1]
            second, second_scales = check_second(w2, w2_scales, quantised=quantised, hidden=None, inter=rows.values.shape[1],
                                                 local=local, device=device)
            routed = _Routed("gemm_combine", group, hidden=second.shape[1], inter=rows.values.shape[1], ids=ids,
                             num_experts=num_experts, mode=mode, stride=check_stride(ids.shape[0], tokens_per_rank),
                             equal=(weights is None,), quantised=quantised)
            if rows.values.shape[0] < routed.rows:
                raise ArgumentError(f"activated has {rows.values.shape[0]} rows, wanted at least {routed.rows}: the output of "
                                    "dispatch_gemm")
            return routed, ids, weights, rows, second, second_scales

        routed, ids, weights, rows, second, second_scales = checked("gemm_combine", ops, seconds, check)
        session = ops.session("gemm_combine", routed.geometry, timeout_s=seconds)
        out = torch.empty(ids.shape[0], second.shape[1], dtype=torch.bfloat16, device=device)
        session.call(routed.fields(session, ids, weights, rows, w2=_matrix(session, second), w2_scales=second_scales, out=out,
                                   weights_before_l2=False), stages=OPEN | ROUTED_SCATTER, timeout_s=seconds, stream=ops.stream())
    return out


def mega_moe(hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor, w13: Tensor, w2: Tensor, *, num_experts: int, mode: str,
             activation: str | Activation, swiglu_limit: float | None, weight_position: str, group: RankGroup,
             timeout_s: float | None, tokens_per_rank: int | None, w13_scales: Tensor | None, w2_scales: Tensor | None,
             hidden_scales: Tensor | None) -> Tensor:
    """The whole layer, [T, H] bfloat16, in three launches, on weights as they are given: nothing is converted or kept."""
    with one_call("mega_moe", group, hidden_states.device, timeout_s) as (ops, seconds):
        device, quantised = hidden_states.device, is_e4m3(w13)

        def check() -> tuple:
            check_one_of("weight_position", weight_position, WEIGHT_POSITIONS)
            hidden, scales = check_hidden(hidden_states, hidden_scales, quantised=quantised, device=device)
            ids, weights = check_ids(topk_ids, topk_weights, hidden.shape[0], num_experts, device)
            local = local_experts(num_experts, group.world, group.rank, mode)[1]
            first, first_scales = check_first(w13, w13_scales, hidden=hidden.shape[1], local=local, device=device)
            second, second_scales = check_second(w2, w2_scales, quantised=quantised, hidden=hidden.shape[1],
                                                 inter=first.shape[1] // 2, local=local, device=device)
            form = resolve_activation(activation, swiglu_limit)
            routed = _Routed("mega_moe", group, hidden=hidden.shape[1], inter=second.shape[2], ids=ids, num_experts=num_experts,
                             mode=mode, stride=check_stride(hidden.shape[0], tokens_per_rank),
                             equal=(form, weight_position, weights is None), quantised=quantised)
            given = dict(hidden_states=hidden, hidden_scales=scales, w13_scales=first_scales, w2_scales=second_scales,
                         **_act_fields(form))
            return routed, ids, weights, first, second, given

        routed, ids, weights, first, second, given = checked("mega_moe", ops, seconds, check)
        session = ops.session("mega_moe", routed.geometry, timeout_s=seconds)
        out = torch.empty(ids.shape[0], second.shape[1], dtype=torch.bfloat16, device=device)
        session.call(routed.fields(session, ids, weights, routed.activation(device), w13=_matrix(session, first),
                                   w2=_matrix(session, second), out=out, weights_before_l2=weight_position == "before_l2", **given),
                     stages=OPEN | ROUTED_GATHER | ROUTED_SCATTER, timeout_s=seconds, stream=ops.stream())
    return out
