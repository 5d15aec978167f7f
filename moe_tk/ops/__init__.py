"""The functional level: each fused pattern as one call. All are collectives: every rank of `group` makes the same call.

group is a ProcessGroup, a one-dimensional DeviceMesh or None (the default group, or this process alone). Bad arguments on
one rank raise ArgumentError there and PeerRefused on the others; a rank that does not come gives ProtocolTimeout after
timeout_s (default MOE_TK_TIMEOUT_S), one that died PeerLost; the ops of that group refuse calls from then on, until
release_ops_memory() has been called on every rank. Forward only.

Tensors on the CPU, or on GPUs that are joined by NVLink (docs/nvlink.md): bfloat16 and e4m3. There calls return at once and
can be captured in CUDA graphs after a first call of that size; a failure is raised by the next op of the group or by
synchronize(), and the results are NaN. Ranks tell each other what they call as part of the call: one that differs is computed by
none.

e4m3 (docs/fp8.md): the weights say so. They come in the kernels' order with their scale pairs, which scaled_weights (dense:
quantise_weights and scale_pairs) makes once from a checkpoint's; no call converts or keeps any. hidden_states are bfloat16,
quantised on their way out of this rank, or e4m3 [T, H] with hidden_scales [T, H / 128] float32, value = hidden * scale. Sums
between ranks and results are bfloat16. H and I of each rank are multiples of 128.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from moe_tk.group import resolve_group
from moe_tk.ops import functional
from moe_tk.ops import registered as _registered  # noqa: F401  registers torch.ops.moe_tk.*
from moe_tk.ops.grouped_gemm import grouped_gemm
from moe_tk.ops.sessions import release_ops_memory, synchronize
from moe_tk.weights.gemm import interleave_gate_up, quantise_rows, quantise_weights, scale_pairs
from moe_tk.weights.scaled import ScaledWeights, scaled_weights

__all__ = ["ScaledWeights", "ag_gemm", "dispatch_gemm", "gemm_combine", "gemm_rs", "grouped_gemm", "interleave_gate_up",
           "mega_moe", "quantise_rows", "quantise_weights", "release_ops_memory", "scale_pairs", "scaled_weights", "synchronize"]


def _compiling() -> bool:
    return torch.compiler.is_compiling()


@torch.compiler.assume_constant_result
def _default_group() -> str:
    """Name of the default group: looked up once, when a function that calls an op is compiled."""
    return resolve_group(None).name


def _name_of(group: Any) -> str:
    """Name of a group, by means that torch.compile can trace."""
    if group is None:
        return _default_group()
    return (group.get_group() if isinstance(group, DeviceMesh) else group).group_name


def ag_gemm(x: Tensor, weight: Tensor, *, group: Any = None, timeout_s: float | None = None,
            x_scales: Tensor | None = None, weight_scales: Tensor | None = None) -> Tensor:
    """all_gather(x) @ weight.T, computed row block by row block as rows arrive.

    x [T, H] bfloat16 or float32, T equal on all ranks, H a multiple of 8; weight [N, H] of this rank (on CUDA N is a multiple of
    8). Returns [world * T, N], rank r's rows at r * T.

    e4m3 (CUDA): weight [N, H] with weight_scales [ceil(N/128), H/128, 2], one expert of quantise_weights and scale_pairs; x
    bfloat16, or e4m3 with x_scales [T, H / 128]; H a multiple of 128. The result is bfloat16.
    """
    if _compiling():
        return torch.ops.moe_tk.ag_gemm(x, weight, _name_of(group), timeout_s, x_scales, weight_scales)
    return functional.ag_gemm(x, weight, resolve_group(group), timeout_s, x_scales, weight_scales)


def gemm_rs(x: Tensor, weight: Tensor, *, group: Any = None, timeout_s: float | None = None,
            x_scales: Tensor | None = None, weight_scales: Tensor | None = None) -> Tensor:
    """reduce_scatter(x @ weight.T): each row goes to its owner as soon as it is computed and is summed there in rank order.

    x [M, K] and weight [N, K]: this rank's part of K (parts may differ in width, from 1); M equal on all ranks and a multiple of
    world, N a multiple of 8 (on CUDA K too). Each rank's partial sum is rounded to the type of x, the sum over ranks is in float32.
    Returns rows rank * M / world ... of the sum, [M / world, N].

    e4m3 (CUDA): weight as in ag_gemm; x e4m3 with x_scales [K / 128, M], both as quantise_rows makes them: rows that do not travel
    have their scales in the engine's order. K is a multiple of 128. Partial sums and result are bfloat16.
    """
    if _compiling():
        return torch.ops.moe_tk.gemm_rs(x, weight, _name_of(group), timeout_s, x_scales, weight_scales)
    return functional.gemm_rs(x, weight, resolve_group(group), timeout_s, x_scales, weight_scales)


def dispatch_gemm(hidden_states: Tensor, topk_ids: Tensor, w13: Tensor, *, num_experts: int, topk_weights: Tensor | None = None,
                  mode: str = "ep", tokens_per_rank: int | None = None, activation: str = "swiglu",
                  swiglu_limit: float | None = None, group: Any = None, timeout_s: float | None = None,
                  w13_scales: Tensor | None = None, hidden_scales: Tensor | None = None) -> tuple[Tensor, ...]:
    """Gathers the rows that this rank's experts want and runs Linear 1 with its activation on each row block as it arrives.

    hidden_states [T, H]; topk_ids [T, k], -1 and ids >= num_experts are skipped; w13 [E_local, 2I, H], gate rows first.
    topk_weights [T, k] given: they multiply the activation. tokens_per_rank: row stride of the tables, at least the largest T
    of any rank, equal on all; None: T is equal on all ranks.
    Returns (activated [rows, I] in slot order, zero where no pair is; expert_offsets [E_local + 1] first slot of each
    expert; slots [world * tokens_per_rank, k] slot of each pair or -1). rows covers any routing. On CUDA I is a multiple of 8.

    e4m3 (CUDA): w13 and w13_scales [E_local, 2I/128, H/128, 2] of scaled_weights. activated is e4m3 then, and a fourth result are
    its scales, activated_scales [I / 128, rows] float32: value = activated * scale, 1 where no pair is.
    """
    if _compiling():
        if w13_scales is not None or hidden_scales is not None:
            return torch.ops.moe_tk.dispatch_gemm_scaled(hidden_states, topk_ids, topk_weights, w13, num_experts, mode,
                                                         tokens_per_rank, activation, swiglu_limit, _name_of(group), timeout_s,
                                                         w13_scales, hidden_scales)
        return torch.ops.moe_tk.dispatch_gemm(hidden_states, topk_ids, topk_weights, w13, num_experts, mode, tokens_per_rank,
                                              activation, swiglu_limit, _name_of(group), timeout_s)
    return functional.dispatch_gemm(hidden_states, topk_ids, topk_weights, w13, num_experts=num_experts, mode=mode,
                                    tokens_per_rank=tokens_per_rank, activation=activation, swiglu_limit=swiglu_limit,
                                    group=resolve_group(group), timeout_s=timeout_s, w13_scales=w13_scales,
                                    hidden_scales=hidden_scales)


def gemm_combine(activated: Tensor, topk_ids: Tensor, w2: Tensor, *, num_experts: int, topk_weights: Tensor | None = None,
                 mode: str = "ep", tokens_per_rank: int | None = None, group: Any = None, timeout_s: float | None = None,
                 activated_scales: Tensor | None = None, w2_scales: Tensor | None = None) -> Tensor:
    """Linear 2 on rows in slot order, then each token's sum over its choices, sent to its rank as soon as it is complete.

    activated [rows, I] as dispatch_gemm of the same topk_ids returned it; w2 [E_local, H, I]. topk_weights [T, k] given: they
    multiply the experts' outputs. Returns [T, H].

    e4m3 (CUDA): activated with activated_scales [I / 128, rows], and w2 with w2_scales [E_local, H/128, I/128, 2] of
    scaled_weights. The result is bfloat16.
    """
    if _compiling():
        return torch.ops.moe_tk.gemm_combine(activated, topk_ids, topk_weights, w2, num_experts, mode, tokens_per_rank,
                                             _name_of(group), timeout_s, activated_scales, w2_scales)
    return functional.gemm_combine(activated, topk_ids, topk_weights, w2, num_experts=num_experts, mode=mode,
                                   tokens_per_rank=tokens_per_rank, group=resolve_group(group), timeout_s=timeout_s,
                                   activated_scales=activated_scales, w2_scales=w2_scales)


def mega_moe(hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor, w13: Tensor, w2: Tensor, *, num_experts: int,
             mode: str = "ep", activation: str = "swiglu", swiglu_limit: float | None = None, weight_position: str = "before_l2",
             tokens_per_rank: int | None = None, group: Any = None, timeout_s: float | None = None,
             w13_scales: Tensor | None = None, w2_scales: Tensor | None = None, hidden_scales: Tensor | None = None) -> Tensor:
    """The whole layer in one call; arguments as in MoELayer, weights of this rank given with each call. Returns [T, H].

    tokens_per_rank: at least the largest T of any rank, equal on all. On CUDA None means that T is equal on all ranks; on the
    CPU T may always differ.

    e4m3 (CUDA): w13, w2, w13_scales and w2_scales of scaled_weights, and hidden_states in either form. The result is bfloat16.
    """
    if _compiling():
        return torch.ops.moe_tk.mega_moe(hidden_states, topk_ids, topk_weights, w13, w2, num_experts, mode, activation,
                                         swiglu_limit, weight_position, _name_of(group), timeout_s, tokens_per_rank,
                                         w13_scales, w2_scales, hidden_scales)
    return functional.mega_moe(hidden_states, topk_ids, topk_weights, w13, w2, num_experts=num_experts, mode=mode,
                               activation=activation, swiglu_limit=swiglu_limit, weight_position=weight_position,
                               group=resolve_group(group), timeout_s=timeout_s, tokens_per_rank=tokens_per_rank,
                               w13_scales=w13_scales, w2_scales=w2_scales, hidden_scales=hidden_scales)
