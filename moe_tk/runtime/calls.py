"""Calls: exchange, tables, launches, result. One function per shape of call; layers and ops are thin shells over these."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_tk.config import env
from moe_tk.errors import MoETkError
from moe_tk.planner.plan import Plan
from moe_tk.runtime.faults import PHASES, op_code
from moe_tk.runtime.host import dtype_code
from moe_tk.runtime.launch import (
    SWIGLU,
    Activation,
    Buffers,
    CallStats,
    delivery_positions,
    launch_fields,
    schedule_fields,
)
from moe_tk.runtime.session import CallHeader, Session
from moe_tk.schedule import Tables, build_tables, check_tables, mega_order, task_order


@dataclass(frozen=True)
class CallOptions:
    """What a call needs beside its tensors."""

    op: str
    plan: Plan
    timeout_s: float
    layer: int = 0
    activation: Activation = SWIGLU
    weights_before_l2: bool = True
    record_trace: bool = False


@dataclass
class CallResult:
    """Output, tables and statistics of a call on this rank."""

    out: Tensor
    tables: Tables
    stats: CallStats


def signature_of(*parts: object) -> int:
    """64-bit hash of whatever must be equal on all ranks."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "little")


class OpenCall:
    """A call between its exchange and its last launch: holds what the launches share."""

    def __init__(self, session: Session, options: CallOptions, counts: list[int], tables: Tables,
                 pair_weights: Tensor | None) -> None:
        self.session, self.options, self.counts, self.tables = session, options, counts, tables
        self.pair_weights = pair_weights
        self.positions = delivery_positions(tables)
        self.stats = CallStats()

    @property
    def num_tokens(self) -> int:
        return self.counts[self.session.group.rank]

    def launch(self, pattern: str, tasks: Tensor, buffers: Buffers, *, dtype: torch.dtype, closes_call: bool,
               ring_blocks: int) -> None:
        """Runs one persistent launch; raises ProtocolTimeout or PeerLost when a wait failed."""
        options, session = self.options, self.session
        buffers.pair_weights = self.pair_weights
        tasks = tasks.contiguous()
        fields = launch_fields(op=op_code(options.op), geometry=session.geometry, plan=options.plan, buffers=buffers,
                               num_tokens=self.num_tokens, activation=options.activation,
                               weights_before_l2=options.weights_before_l2, closes_call=closes_call,
                               record_trace=options.record_trace, ring_blocks=ring_blocks)
        result = session.native.launch(pattern=pattern, dtype=dtype_code(dtype), launch=fields,
                                       schedule=schedule_fields(self.tables, tasks, self.positions), timeout_s=options.timeout_s)
        self.stats.add(result, PHASES)
        if result["fault"]:
            raise MoETkError(f"{options.op}: a block failed: {result['fault']}")
        if not result["ok"]:
            session.fail(options.op, options.timeout_s)


def open_routed_call(session: Session, options: CallOptions, *, topk_ids: Tensor, topk_weights: Tensor | None, signature: int,
                     num_experts: int, segments: int, tokens_per_rank: int | None = None) -> OpenCall:
    """Exchanges the routing of all ranks and builds this rank's tables.

    topk_ids [T, k] int32 or int64; topk_weights [T, k] float32 or None (all ones)
    tokens_per_rank  row stride of the tables; None = the largest T of this call
    """
    geometry = session.geometry
    ids = topk_ids.to(torch.int32).contiguous()
    weights = torch.ones_like(ids, dtype=torch.float32) if topk_weights is None else topk_weights.float().contiguous()
    header = CallHeader(options.op, options.layer, signature, ids.shape[0])
    counts = session.open_call(header, timeout_s=options.timeout_s, topk_ids=ids, topk_weights=weights)
    stride = max(1, *counts) if tokens_per_rank is None else tokens_per_rank
    shape = (geometry.world * stride, geometry.top_k)
    all_ids = session.workspace.region("topk_ids", torch.int32)[:, :stride].reshape(shape).contiguous()
    all_weights = session.workspace.region("topk_weights", torch.float32)[:, :stride].reshape(shape).contiguous()
    tables = build_tables(all_ids, token_counts=counts, world=geometry.world, rank=session.group.rank, num_experts=num_experts,
                          mode=geometry.mode, row_block=geometry.row_block, segments=segments, job_chunk=geometry.job_chunk)
    if env("MOE_TK_VALIDATE"):
        check_tables(tables, all_ids)
    return OpenCall(session, options, counts, tables, None if topk_weights is None else all_weights)


def _columns(width: int, plan: Plan) -> int:
    return -(-width // plan.column_block)


def run_two_kernel(call: OpenCall, tokens: Tensor, w13: Tensor, w2: Tensor, out: Tensor) -> None:
    """gather-GEMM, then GEMM-scatter. tokens [T, H], w13 [E_local, 2I, H], w2 [E_local, H, I], out [T, H]."""
    workspace, geometry, plan = call.session.workspace, call.session.geometry, call.options.plan
    activated = workspace.local("activated")
    blocks = call.tables.num_blocks
    call.launch("gather_gemm", task_order(call.tables, _columns(geometry.intermediate, plan)),
                Buffers(tokens=tokens, gathered=workspace.local("gathered"), w13=w13, activated=activated),
                dtype=tokens.dtype, closes_call=False, ring_blocks=max(blocks, 1))
    call.launch("gemm_scatter_gated", task_order(call.tables, _columns(geometry.out_width, plan)),
                Buffers(activated=activated, w2=w2, expert_out=workspace.local("expert_out"), out=out),
                dtype=tokens.dtype, closes_call=True, ring_blocks=max(blocks, 1))


def run_mega(call: OpenCall, tokens: Tensor, w13: Tensor, w2: Tensor, out: Tensor) -> None:
    """The whole layer in one launch; shapes as in run_two_kernel."""
    workspace, geometry, plan = call.session.workspace, call.session.geometry, call.options.plan
    tasks = mega_order(call.tables, _columns(geometry.intermediate, plan), _columns(geometry.out_width, plan),
                       min(plan.warmup, geometry.max_warmup))
    call.launch("mega", tasks, Buffers(tokens=tokens, gathered=workspace.local("gathered"), w13=w13,
                                       activated=workspace.local("activated"), w2=w2,
                                       expert_out=workspace.local("expert_out"), out=out),
                dtype=tokens.dtype, closes_call=True, ring_blocks=geometry.ring_blocks)


def run_gather(call: OpenCall, tokens: Tensor, weights: Tensor, out: Tensor, *, gated: bool) -> None:
    """gather-GEMM alone into `out` [slots, N], which the caller has zeroed: padding rows are not written."""
    workspace, geometry, plan = call.session.workspace, call.session.geometry, call.options.plan
    call.launch("gather_gemm" if gated else "gather_gemm_plain", task_order(call.tables, _columns(geometry.intermediate, plan)),
                Buffers(tokens=tokens, gathered=workspace.local("gathered"), w13=weights, activated=out), dtype=tokens.dtype,
                closes_call=True, ring_blocks=max(call.tables.num_blocks, 1))


def run_scatter(call: OpenCall, rows: Tensor, weights: Tensor, out: Tensor) -> None:
    """GEMM-scatter alone: rows [slots, K] in the slot order of the call's tables, out [T, N]."""
    workspace, geometry, plan = call.session.workspace, call.session.geometry, call.options.plan
    call.launch("gemm_scatter", task_order(call.tables, _columns(geometry.out_width, plan)),
                Buffers(activated=rows, w2=weights, expert_out=workspace.local("expert_out"), out=out), dtype=rows.dtype,
                closes_call=True, ring_blocks=max(call.tables.num_blocks, 1))
