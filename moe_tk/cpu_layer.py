"""The layer on the CPU back end: what moe_tk.MoELayer makes unless it is asked for another one (moe_tk.layer)."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor

from moe_tk import reference as _reference
from moe_tk.arguments import COMPUTE_DTYPES, as_contiguous, check_routing, check_tensor, names
from moe_tk.config import env
from moe_tk.errors import ArgumentError, ArgumentTypeError
from moe_tk.group import resolve_group
from moe_tk.memory.estimate import estimate, layer_geometry
from moe_tk.memory.layout import MemoryEstimate
from moe_tk.ops import registered as _registered  # noqa: F401  a compiled call needs torch.ops.moe_tk
from moe_tk.ops.handles import keep_handle
from moe_tk.planner import Plan, make_plan
from moe_tk.runtime.calls import CallOptions, open_routed_call, run_mega, run_two_kernel, signature_of
from moe_tk.runtime.launch import Activation, CallStats, resolve_activation
from moe_tk.runtime.serial import run_serial
from moe_tk.runtime.session import SESSIONS, CallHeader
from moe_tk.sizes import check_layer_sizes, check_one_of, check_positive
from moe_tk.weights import from_checkpoint

WEIGHT_POSITIONS = ("before_l2", "combine")
RUNNERS = {"mega": run_mega, "two_kernel": run_two_kernel, "serial": run_serial}


class CpuMoELayer:
    """A Mixture-of-Experts layer over the ranks of a group: y = sum over k of weight * expert(x).

    group          ProcessGroup, one-dimensional DeviceMesh or None (default group, or one process alone)
    mode           "ep": this rank owns whole experts, E_local = E / world (the first ranks own one more if it does not
                   divide); "tp": it owns I / world columns of every expert
    dtype          torch.bfloat16 or torch.float32; accumulation and routing weights are float32
    weight_position "before_l2": the routing weight multiplies the activation before the second GEMM; "combine": the
                   expert's output. Equal in exact arithmetic, not in bfloat16
    timeout_s      limit of every wait (default MOE_TK_TIMEOUT_S, 10 s)

    Making one is a collective: all ranks make the same layers in the same order. Raises ArgumentError for sizes that
    cannot be (PeerRefused on the other ranks), CapacityError when memory is short, BuildError when the native module
    cannot be built.
    """

    def __init__(self, group: Any = None, *, num_experts: int, top_k: int, hidden_size: int, intermediate_size: int,
                 max_tokens_per_rank: int, mode: str = "ep", pattern: str = "auto", protocol: str = "auto",
                 dtype: torch.dtype = torch.bfloat16, activation: str | Activation = "swiglu", swiglu_limit: float | None = None,
                 weight_position: str = "before_l2", timeout_s: float | None = None, segments: int | None = None,
                 compute_blocks: int | None = None, pull: bool = False) -> None:
        self.group = resolve_group(group)
        with self.group.local_step("MoELayer", timeout_s=env("MOE_TK_TIMEOUT_S")):
            check_layer_sizes(world=self.group.world, rank=self.group.rank, num_experts=num_experts, top_k=top_k,
                              hidden_size=hidden_size, intermediate_size=intermediate_size,
                              max_tokens_per_rank=max_tokens_per_rank, mode=mode)
            if dtype not in COMPUTE_DTYPES:
                raise ArgumentTypeError(f"dtype is {dtype}, wanted {names(COMPUTE_DTYPES)}")
            check_one_of("weight_position", weight_position, WEIGHT_POSITIONS)
            self.timeout_s = check_positive("timeout_s", env("MOE_TK_TIMEOUT_S") if timeout_s is None else timeout_s, "seconds")
            self.activation = resolve_activation(activation, swiglu_limit)
            self.plan: Plan = make_plan(pattern=pattern, protocol=protocol, max_tokens=max_tokens_per_rank,
                                        cores=os.cpu_count() or 1, world=self.group.world, segments=segments,
                                        compute_blocks=compute_blocks, pull=pull)
            geometry = layer_geometry(
                world=self.group.world, rank=self.group.rank, num_experts=num_experts, top_k=top_k, hidden_size=hidden_size,
                intermediate_size=intermediate_size, max_tokens_per_rank=max_tokens_per_rank, mode=mode,
                dtype=str(dtype).removeprefix("torch."), pattern=self.plan.pattern, row_block=self.plan.row_block,
                segments=self.plan.segments, job_chunk=self.plan.job_chunk)
            self.memory: MemoryEstimate = estimate(geometry)
        self.num_experts, self.top_k, self.max_tokens_per_rank = num_experts, top_k, max_tokens_per_rank
        self.hidden_size, self.intermediate_size = hidden_size, intermediate_size
        self.mode, self.dtype, self.weight_position = mode, dtype, weight_position
        with torch.inference_mode(False):  # what lives as long as the layer must serve calls in any mode
            self.session = SESSIONS.get(self.group, geometry)
            self.expert_load = torch.zeros(geometry.num_local_experts, dtype=torch.int64, device="cpu")
        self.ordinal = self.session.add_layer()
        self.stats = CallStats()
        self.tables = None  # of the last call
        self.record_trace = False
        self._w13: Tensor | None = None
        self._w2: Tensor | None = None
        self.handle = keep_handle(self)

    @property
    def num_local_experts(self) -> int:
        """Experts that this rank computes: its own in EP, all of them in TP."""
        return self.session.geometry.num_local_experts

    @property
    def local_intermediate(self) -> int:
        """Intermediate columns that this rank computes: all of them in EP, its share in TP."""
        return self.session.geometry.intermediate

    def load_weights(self, w13: Tensor, w2: Tensor, *, interleaved: bool = False, transposed: bool = False) -> None:
        """Takes this rank's weights: w13 [E_local, 2I, H], gate rows first, w2 [E_local, H, I] (TP: I is this rank's share).

        interleaved, transposed  other checkpoints' layouts, see moe_tk.weights.from_checkpoint; weights that are in our
        layout already are kept as they are, not copied. Raises ArgumentError for other shapes or dtypes.
        """
        experts, inter, hidden = self.num_local_experts, self.local_intermediate, self.hidden_size
        first, second = (experts, 2 * inter, hidden), (experts, hidden, inter)
        if transposed:
            first, second = (experts, hidden, 2 * inter), (experts, inter, hidden)
        check_tensor("w13", w13, dtypes=(self.dtype,), shape=first, layout="[E_local, H, 2I]" if transposed else "[E_local, 2I, H]")
        check_tensor("w2", w2, dtypes=(self.dtype,), shape=second, layout="[E_local, I, H]" if transposed else "[E_local, H, I]")
        self._w13, self._w2 = from_checkpoint(w13.detach(), w2.detach(), interleaved=interleaved, transposed=transposed)

    def __call__(self, hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor, *, out: Tensor | None = None) -> Tensor:
        """[T, H] -> [T, H]. A collective: every rank calls, also with T = 0; T may differ from rank to rank and call to call.

        topk_ids [T, k] int32 or int64, global expert ids; -1 and ids >= num_experts are skipped. topk_weights [T, k] float32
        or bfloat16, need not sum to 1; the same expert twice in a row counts twice.
        out  [T, H] contiguous, written in place of a new tensor. When the call fails no tensor is returned, and what `out`
             holds is undefined

        Raises on all ranks alike, and the layer stays usable: ArgumentError (this rank) with PeerRefused (the others),
        CapacityError. Raises ProtocolTimeout or PeerLost when a rank does not come; the layer is unusable then.
        """
        if torch.compiler.is_compiling():
            result = torch.ops.moe_tk.moe_layer(hidden_states, topk_ids, topk_weights, self.handle)
            return result if out is None else out.copy_(result)
        return self.forward_into(hidden_states, topk_ids, topk_weights, out)

    def forward_into(self, hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor, out: Tensor | None = None) -> Tensor:
        """The call itself, eager. Shapes as in __call__."""
        signature = signature_of("moe_layer", self.session.geometry.shared_key(), self.intermediate_size, self.plan.pattern,
                                 self.plan.pull, self.weight_position, self.activation)
        options = CallOptions(op="moe_layer", plan=self.plan, timeout_s=self.timeout_s, layer=self.ordinal,
                              activation=self.activation, weights_before_l2=self.weight_position == "before_l2",
                              record_trace=self.record_trace)
        with self.session.one_call("moe_layer"):
            try:
                hidden, ids, weights, out = self._check_call(hidden_states, topk_ids, topk_weights, out)
            except Exception as error:  # whatever keeps this rank from taking part, the others must hear of it
                self.session.open_call(CallHeader("moe_layer", self.ordinal, signature, 0), timeout_s=self.timeout_s,
                                       refused=str(error))
                raise
            call = open_routed_call(self.session, options, topk_ids=ids, topk_weights=weights, signature=signature,
                                    num_experts=self.num_experts, segments=self.plan.segments)
            RUNNERS[self.plan.pattern](call, hidden, self._w13, self._w2, out)
        self.expert_load += call.tables.expert_load
        self.stats, self.tables = call.stats, call.tables
        return out

    def _check_call(self, hidden_states: Any, topk_ids: Any, topk_weights: Any, out: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        if self._w13 is None:
            raise ArgumentError("the layer has no weights: call load_weights(w13, w2) first")
        hidden = check_tensor("hidden_states", hidden_states, dtypes=(self.dtype,), shape=(None, self.hidden_size), layout="[T, H]")
        tokens = hidden.shape[0]
        ids, weights = check_routing(topk_ids, topk_weights, num_tokens=tokens, top_k=self.top_k, num_experts=self.num_experts,
                                     rank=self.group.rank)
        if out is None:
            out = hidden.new_empty(tokens, self.hidden_size)
        check_tensor("out", out, dtypes=(self.dtype,), shape=(tokens, self.hidden_size), layout="[T, H]")
        if not out.is_contiguous():
            raise ArgumentError(f"out has strides {out.stride()}, wanted a contiguous tensor")
        return as_contiguous("hidden_states", hidden), ids, weights, out

    def synchronize(self) -> None:
        """Waits until all calls are done and raises what they failed with. Here a call is done when it returns."""

    def reset_expert_load(self) -> None:
        """Starts the counting of `expert_load` (tokens per local expert) anew."""
        self.expert_load.zero_()

    def reference(self, hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
        """The unfused layer in float64 on this process, for the full weights w13 [E, 2I, H], w2 [E, H, I]: [T, H] float64."""
        form = self.activation
        return _reference.moe_layer(hidden_states, topk_ids, topk_weights, w13, w2, alpha=form.alpha, beta=form.beta,
                                    gate_limit=form.gate_limit, up_limit=form.up_limit)
