"""The grouped GEMM engine on CUDA: its module, its task tables and its launches. Pointers in, nothing is synchronised."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from moe_tk.builder.build import build_cuda_module, load_module
from moe_tk.builder.native_root import native_modules
from moe_tk.errors import ArgumentError
from moe_tk.runtime.gemm_tiles import POLICY_NORMAL, choose_tile

NAME = "moe_tk_gemm"
DTYPES = {torch.bfloat16: "bf16", torch.float8_e4m3fn: "e4m3"}
FIRST_CAPABILITY = (9, 0)


def gemm_module(device: torch.device) -> ModuleType:
    """The module for this GPU, built on first use. Raises BuildError, or ArgumentError where the engine does not run."""
    return _module_for(torch.cuda.get_device_capability(device))


@functools.cache
def _module_for(capability: tuple[int, int]) -> ModuleType:
    if capability != FIRST_CAPABILITY:
        raise ArgumentError(f"the GPU has compute capability {capability[0]}.{capability[1]}; the wgmma engine runs on 9.0 alone "
                            "(H100, H200, GH200)")
    sources = next(module.sources for module in native_modules() if module.name == NAME)
    return load_module(build_cuda_module(NAME, sources, arch="90a"), NAME)


@functools.cache
def num_sms(device: torch.device) -> int:
    """Multiprocessors of a GPU: the blocks of a persistent launch."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def variants(device: torch.device, dtype: str) -> list[dict[str, Any]]:
    """The compiled configurations of "bf16" or "e4m3": name, block_m, block_n, stages, cluster, shared_bytes, swiglu, hooked."""
    return gemm_module(device).gemm_variants(dtype)


@functools.cache
def _variant(device: torch.device, dtype: str, name: str) -> dict[str, Any]:
    found = {v["name"]: v for v in variants(device, dtype)}
    if name not in found:
        raise ArgumentError(f"tile is {name!r}; compiled for {dtype}: {', '.join(found)}")
    return found[name]


@dataclass(frozen=True, slots=True, eq=False)
class GemmPlan:
    """Configuration and task table of grouped GEMMs over one layout of rows; weights of the same shape share it.

    tasks [row blocks * column blocks, 4], num_tasks [1], block_rows [row blocks]: int32 on the device.
    """

    variant: dict[str, Any]
    dtype: str
    weights_policy: int
    num_experts: int
    columns: int
    tasks: Tensor
    num_tasks: Tensor
    block_rows: Tensor


def make_plan(dtype: torch.dtype, expert_offsets: Tensor, expert_rows: Tensor | None, *, num_slots: int, columns: int,
              row_block: int, activation: bool, tile: str | None = None) -> GemmPlan:
    """Chooses the tile and launches the builder of the task table on the current stream.

    expert_offsets [E + 1] int32: first slot of each expert, multiples of row_block, last <= num_slots. expert_rows [E] int32:
    rows of each expert that are not padding, None: all.
    """
    device, kind = expert_offsets.device, DTYPES[dtype]
    num_experts = expert_offsets.numel() - 1
    choice = choose_tile(kind, row_block=row_block, num_slots=num_slots, num_experts=num_experts, columns=columns,
                         activation=activation, num_sms=num_sms(device))
    variant = _variant(device, kind, tile or choice.name)
    if variant["block_m"] != row_block:
        raise ArgumentError(f"tile {variant['name']} has blocks of {variant['block_m']} rows, row_block is {row_block}")
    blocks, col_blocks = num_slots // row_block, -(-columns // variant["block_n"])
    tasks = torch.empty(max(blocks * col_blocks, 1), 4, dtype=torch.int32, device=device)
    counts = torch.empty(max(blocks, 1) + 4, dtype=torch.int32, device=device)
    plan = GemmPlan(variant=variant, dtype=kind, weights_policy=POLICY_NORMAL if tile else choice.weights_policy,
                    num_experts=num_experts, columns=columns, tasks=tasks, num_tasks=counts[:1], block_rows=counts[4:])
    gemm_module(device).build_tasks(
        group_offsets=expert_offsets.data_ptr(), group_rows=expert_rows.data_ptr() if expert_rows is not None else 0,
        num_groups=num_experts, num_experts=num_experts, num_col_blocks=col_blocks, block_m=row_block, tasks=tasks.data_ptr(),
        num_tasks=plan.num_tasks.data_ptr(), block_rows=plan.block_rows.data_ptr(), stream=_stream(device))
    return plan


def launch(plan: GemmPlan, x: Tensor, w: Tensor, out: Tensor, *, swiglu: dict[str, float] | None = None,
           slot_weight: Tensor | None = None, x_scale: Tensor | None = None, w_scale: Tensor | None = None,
           out_scale: Tensor | None = None, hooks: dict[str, int] | None = None, num_blocks: int | None = None) -> None:
    """One persistent launch on the current stream, out = epilogue(x w^T). Shapes as in moe_tk.ops.grouped_gemm, unchecked.

    swiglu: alpha, beta, limit. hooks: gate_arrived, gate_want, gate_record, push_finished (pointers), gate_timeout_ns.
    num_blocks: of the persistent grid, None: one for each multiprocessor. A block fills its multiprocessor, so with a gate
    whoever delivers the rows on this GPU needs multiprocessors that are left out here.
    """
    pointers: dict[str, Any] = dict(hooks or {})
    if slot_weight is not None:
        pointers["slot_weight"] = slot_weight.data_ptr()
    if x_scale is not None and w_scale is not None:
        pointers |= {"token_scales": x_scale.data_ptr(), "token_scales_stride": x_scale.stride(0),
                     "weight_scales": w_scale.data_ptr()}
    if out_scale is not None:
        pointers |= {"out_scales": out_scale.data_ptr(), "out_scales_stride": out_scale.stride(0)}
    gemm_module(x.device).grouped_gemm(
        dtype=plan.dtype, variant=plan.variant["index"], swiglu=swiglu is not None, tokens=x.data_ptr(), weights=w.data_ptr(),
        out=out.data_ptr(), num_slots=x.shape[0], n=w.shape[1], k=w.shape[2], num_experts=w.shape[0], tokens_stride=x.stride(0),
        out_stride=out.stride(0), tasks=plan.tasks.data_ptr(), num_tasks_ptr=plan.num_tasks.data_ptr(),
        block_rows=plan.block_rows.data_ptr(), num_sms=num_blocks or num_sms(x.device), weights_policy=plan.weights_policy,
        stream=_stream(x.device), **(swiglu or {}), **pointers)


def _stream(device: torch.device) -> int:
    return torch.cuda.current_stream(device).cuda_stream
