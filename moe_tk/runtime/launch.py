"""From tables and tensors to the fields of a launch: the only place that knows both sides' names."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from moe_tk.errors import ArgumentError
from moe_tk.memory.geometry import Geometry
from moe_tk.planner.plan import Plan
from moe_tk.schedule import Tables
from moe_tk.sizes import check_positive


@dataclass(frozen=True)
class Activation:
    """g * sigmoid(alpha * g) * (u + beta); g <= gate_limit and |u| <= up_limit where a limit is not None."""

    alpha: float = 1.0
    beta: float = 0.0
    gate_limit: float | None = None
    up_limit: float | None = None

    def __post_init__(self) -> None:
        """Raises ArgumentError for what the kernels would not compute: limits <= 0, coefficients that are no numbers."""
        for name in ("gate_limit", "up_limit"):
            if getattr(self, name) is not None:
                check_positive(f"Activation.{name}", getattr(self, name))
        for name in ("alpha", "beta"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
                raise ArgumentError(f"Activation.{name} is {value!r}, wanted a finite number")


SWIGLU = Activation()
ACTIVATIONS = {"swiglu": SWIGLU, "gpt_oss": Activation(alpha=1.702, beta=1.0, gate_limit=7.0, up_limit=7.0)}


def resolve_activation(activation: str | Activation, swiglu_limit: float | None) -> Activation:
    """Activation of a name, with `swiglu_limit` (> 0) as limit of both halves where given. Raises ArgumentError."""
    if isinstance(activation, str) and activation in ACTIVATIONS:
        activation = ACTIVATIONS[activation]
    if not isinstance(activation, Activation):
        raise ArgumentError(f"activation is {activation!r}, wanted one of {', '.join(ACTIVATIONS)} or an Activation")
    if swiglu_limit is None:
        return activation
    limit = check_positive("swiglu_limit", swiglu_limit)
    return replace(activation, gate_limit=limit, up_limit=limit)


@dataclass
class Buffers:
    """Tensors of one launch; None is a null pointer. Shapes: docs/architecture.md."""

    tokens: Tensor | None = None
    gathered: Tensor | None = None
    w13: Tensor | None = None
    activated: Tensor | None = None
    w2: Tensor | None = None
    expert_out: Tensor | None = None
    out: Tensor | None = None
    pair_weights: Tensor | None = None


@dataclass
class CallStats:
    """What one call did on this rank, summed over its launches."""

    bytes_dispatched: list[int] = field(default_factory=list)  # [R] sent to (push) or read from (pull) each rank
    bytes_combined: list[int] = field(default_factory=list)    # [R] partial rows sent to each rank
    wait_s: dict[str, float] = field(default_factory=dict)     # by phase, summed over blocks
    busy_s: dict[str, float] = field(default_factory=dict)
    trace: list[tuple] = field(default_factory=list)  # (launch, block, phase, item, begin_ns, ready_ns, end_ns)
    launches: int = 0

    def add(self, result: dict, phases: tuple[str, ...]) -> None:
        """Adds the result of one launch of the native module."""
        for name in ("bytes_dispatched", "bytes_combined"):
            before = getattr(self, name) or [0] * len(result[name])
            setattr(self, name, [a + b for a, b in zip(before, result[name], strict=True)])
        for mine, theirs in ((self.wait_s, result["wait_ns"]), (self.busy_s, result["busy_ns"])):
            for phase, value in zip(phases, theirs, strict=True):
                if value:
                    mine[phase] = mine.get(phase, 0.0) + value * 1e-9
        self.trace += [(self.launches, block, phases[phase], *rest) for block, phase, *rest in result["trace"]]
        self.launches += 1


def delivery_positions(tables: Tables) -> Tensor:
    """[n_pull] int32: position of each delivered row among the rows of the same source."""
    source = (tables.delivery_order.long() // max(tables.tokens_per_rank, 1)).clamp(min=0)
    order = torch.argsort(source, stable=True)
    count = source.new_zeros(tables.world + 1).scatter_add(0, source + 1, torch.ones_like(source))
    position = torch.arange(source.numel(), device=source.device) - count.cumsum(0)[source[order]]
    return torch.empty_like(position).scatter(0, order, position).int()


def schedule_fields(tables: Tables, tasks: Tensor, positions: Tensor) -> dict:
    """Fields of patterns::schedule_view. The tensors must outlive the launch."""
    return {
        "tokens_per_rank": tables.tokens_per_rank, "top_k": tables.top_k, "num_local_experts": tables.num_local_experts,
        "row_block": tables.row_block, "job_chunk": tables.job_chunk, "num_blocks": tables.num_blocks,
        "num_pull": tables.num_jobs, "num_jobs": tables.num_jobs, "num_tasks": tasks.shape[0], "num_chunks": tables.num_chunks,
        "slots": tables.slots.data_ptr(), "slot_pair": tables.slot_pair.data_ptr(),
        "delivery_order": tables.delivery_order.data_ptr(), "delivery_pos": positions.data_ptr(),
        "block_target": tables.block_target.data_ptr(), "block_group": tables.block_group.data_ptr(),
        "tasks": tasks.data_ptr(), "job_order": tables.job_order.data_ptr(),
        "chunk_expected": tables.chunk_expected.data_ptr(), "send_order": tables.send_order.data_ptr(),
        "send_count": tables.send_count.data_ptr(), "contributors": tables.contributors.data_ptr(),
    }


def launch_fields(*, op: int, geometry: Geometry, plan: Plan, buffers: Buffers, num_tokens: int, activation: Activation,
                  weights_before_l2: bool, closes_call: bool, record_trace: bool, ring_blocks: int) -> dict:
    """Fields of patterns::launch_globals."""
    pointers = {name: 0 if tensor is None else tensor.data_ptr() for name, tensor in vars(buffers).items()}
    return {
        "op": op, "hidden": geometry.hidden, "intermediate": geometry.intermediate, "out_width": geometry.out_width,
        "column_block": plan.column_block, "send_chunk": geometry.send_chunk, "ring_blocks": ring_blocks,
        "num_tokens": num_tokens, **pointers, "weights_before_l2": weights_before_l2,
        "alpha": activation.alpha, "beta": activation.beta, "gate_limit": activation.gate_limit or 0.0,
        "up_limit": activation.up_limit or 0.0, "num_send": plan.send_blocks, "num_place": plan.place_blocks,
        "num_compute": plan.compute_blocks, "num_combine": plan.combine_blocks, "closes_call": closes_call,
        "record_trace": record_trace, "pull": plan.pull,
    }
