"""MoELayer on the CUDA back end: bfloat16 or e4m3, EP and TP, over NVLink; three launches per call on the current stream, or
five in the serial pattern.

Calls are asynchronous and can be captured in CUDA graphs. What a call fails with on the device is raised by the next call or
by synchronize(); its result is NaN.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_tk.arguments import as_contiguous, check_routing_tensors, check_tensor, names
from moe_tk.config import env
from moe_tk.cpu_layer import WEIGHT_POSITIONS, CpuMoELayer
from moe_tk.errors import ArgumentError, ArgumentTypeError, CapacityError, TopologyError
from moe_tk.group import RankGroup, resolve_group
from moe_tk.memory.layout import MemoryEstimate
from moe_tk.memory.nvlink_layout import FUSED_COLUMN_BLOCK, JOB_CHUNK, ROW_BLOCKS, NvlinkGeometry, nvlink_estimate
from moe_tk.ops.handles import keep_handle
from moe_tk.planner import Plan, explain_fusion
from moe_tk.runtime.calls import signature_of
from moe_tk.runtime.launch import Activation, CallStats, resolve_activation
from moe_tk.runtime.nvlink_layer import NvlinkLayer
from moe_tk.runtime.nvlink_session import too_many_tokens
from moe_tk.sizes import check_count, check_layer_sizes, check_one_of, check_positive
from moe_tk.weights import from_checkpoint
from moe_tk.weights.scaled import E4M3, check_scales

PATTERNS = ("auto", "two_kernel", "serial")
DTYPES = (torch.bfloat16, E4M3)


class CudaMoELayer(CpuMoELayer):
    """What MoELayer(protocol="nvlink") makes; the arguments are those of MoELayer, except

    pattern      "two_kernel", "serial", or "auto", which takes either for each call
    dtype        torch.bfloat16, or torch.float8_e4m3fn: rows travel and both GEMMs multiply in e4m3 with float32 scales of 1 x 128
                 (rows) and 128 x 128 (weights); hidden_size and this rank's intermediate columns are multiples of 128. Results and
                 partial sums are bfloat16
    device       of the tensors and of this rank's GPU (default: the current one)
    segments     batches of tokens whose tasks run one after the other (default 1)
    row_block    64 or 128 slots (default: chosen by the size of each call)
    traced       the kernels record what they do (moe_tk.runtime.stamps, docs/trace.md); default MOE_TK_TRACE. Another build, and
                 more memory than `memory` says
    reserve_sms  multiprocessors that are left to other streams. All blocks of a launch wait for each other, so they must be
                 resident together: a kernel of another stream that holds multiprocessors for longer than timeout_s needs this
    """

    def __init__(self, group: Any = None, *, num_experts: int, top_k: int, hidden_size: int, intermediate_size: int,
                 max_tokens_per_rank: int, mode: str = "ep", pattern: str = "auto", protocol: str = "nvlink",
                 dtype: torch.dtype = torch.bfloat16, activation: str | Activation = "swiglu", swiglu_limit: float | None = None,
                 weight_position: str = "before_l2", timeout_s: float | None = None, segments: int | None = None,
                 device: torch.device | str | int | None = None, reserve_sms: int = 0, row_block: int | None = None,
                 traced: bool | None = None) -> None:
        self.group = resolve_group(group)
        with self.group.local_step("MoELayer", timeout_s=env("MOE_TK_TIMEOUT_S")):
            check_layer_sizes(world=self.group.world, rank=self.group.rank, num_experts=num_experts, top_k=top_k,
                              hidden_size=hidden_size, intermediate_size=intermediate_size,
                              max_tokens_per_rank=max_tokens_per_rank, mode=mode)
            self._check_choices(pattern, protocol, dtype, weight_position, row_block)
            self.timeout_s = check_positive("timeout_s", env("MOE_TK_TIMEOUT_S") if timeout_s is None else timeout_s, "seconds")
            self.activation = resolve_activation(activation, swiglu_limit)
            geometry = NvlinkGeometry(world=self.group.world, rank=self.group.rank, max_tokens=max_tokens_per_rank, top_k=top_k,
                                      num_experts=num_experts, hidden=hidden_size, intermediate_size=intermediate_size,
                                      mode=mode, max_segments=check_count("segments", 1 if segments is None else segments),
                                      dtype=str(dtype).removeprefix("torch."))
            self.memory: MemoryEstimate = nvlink_estimate(geometry)
            check_count("reserve_sms", reserve_sms, least=0)
            self.device = own_device(self.group, device)  # last: what can be refused without a GPU is
        self.num_experts, self.top_k, self.max_tokens_per_rank = num_experts, top_k, max_tokens_per_rank
        self.hidden_size, self.intermediate_size = hidden_size, intermediate_size
        self.mode, self.dtype, self.weight_position = mode, dtype, weight_position
        with torch.inference_mode(False):  # what lives as long as the layer must serve calls in any mode
            self._calls = NvlinkLayer(self.group, geometry, device=self.device, activation=self.activation,
                                      weights_before_l2=weight_position == "before_l2", timeout_s=self.timeout_s,
                                      segments=segments, row_block=row_block, reserve_sms=reserve_sms,
                                      pattern=pattern, traced=env("MOE_TK_TRACE") if traced is None else traced)
        self.session = self._calls.session
        self.ordinal = self.session.add_layer()
        self._signature = signature_of("moe_layer", "nvlink", geometry.shared_key(), self.ordinal, weight_position, self.activation)
        self.plan = self._plan(geometry, pattern)
        self.stats, self.tables, self.record_trace = CallStats(), None, False
        self.handle = keep_handle(self)

    @staticmethod
    def _check_choices(pattern: str, protocol: str, dtype: torch.dtype, weight_position: str, row_block: int | None) -> None:
        if pattern not in PATTERNS:
            raise ArgumentError(f"pattern is {pattern!r}, wanted one of {', '.join(PATTERNS)} on the CUDA back end")
        if protocol not in ("auto", "nvlink"):
            raise TopologyError(f"protocol is {protocol!r}, wanted 'nvlink' on the CUDA back end")
        if dtype not in DTYPES:
            raise ArgumentTypeError(f"dtype is {dtype}, wanted {names(DTYPES)} on the CUDA back end")
        check_one_of("weight_position", weight_position, WEIGHT_POSITIONS)
        if row_block is not None and row_block not in ROW_BLOCKS:
            raise ArgumentError(f"row_block is {row_block}, wanted one of {', '.join(map(str, ROW_BLOCKS))} or None")

    def _plan(self, g: NvlinkGeometry, pattern: str) -> Plan:
        sms, machine = self.session.num_sms, self._calls.machine
        why = {"two_kernel": ("pattern two_kernel: the fused pattern of the CUDA back end, three launches",),
               "serial": ("pattern serial: rows, GEMM 1, GEMM 2, combine one after the other, five launches",),
               "auto": ("pattern auto: two_kernel or serial, chosen by this rank for each call from its number of tokens; other "
                        "ranks may choose differently",
                        f"auto takes this GPU for {machine.name}: {machine.tflops:.0f} TFLOP/s, {machine.hbm_gbs:.0f} GB/s memory, "
                        f"{machine.wire_gbs:.0f} GB/s wire ({machine.origin})",
                        *explain_fusion(self._calls.choice, g.max_tokens))}
        placed = (("fused calls with as many tokens as fit write rows to their slots first, in a fourth launch",)
                  if self._calls.variant_of(g.max_tokens).placed else ())
        reasons = (*why[pattern], *placed,
                   "row blocks of 64 for calls with few rows per expert, of 128 for others; tiles of 128 columns instead of 256 "
                   "where experts have few rows",
                   "owners send each row once to each rank that wants it; the rows are there before GEMM 1 begins",
                   f"{sms} blocks in each GEMM; in two_kernel two warps of each gather rows in GEMM 1, and one combines in GEMM 2, "
                   "which the others join; in serial rows are written to their slots first")
        return Plan(pattern=pattern, protocol="nvlink", segments=g.max_segments, row_block=ROW_BLOCKS[-1],
                    column_block=FUSED_COLUMN_BLOCK, job_chunk=JOB_CHUNK, warmup=0, send_blocks=sms, place_blocks=0,
                    compute_blocks=sms, combine_blocks=sms, pull=False, reasons=reasons)

    @property
    def num_local_experts(self) -> int:
        """Experts that this rank computes: its own in EP, all of them in TP."""
        return self._calls.geometry.num_local_experts

    @property
    def local_intermediate(self) -> int:
        """Intermediate columns that this rank computes: all of them in EP, its share in TP."""
        return self._calls.geometry.local_intermediate

    @property
    def expert_load(self) -> Tensor:
        """[E_local] int64 on the device: rows per local expert since the last reset, counted by the kernels."""
        return self.session.workspace.local("load_total", torch.int64)[:self.num_local_experts].clone()

    def reset_expert_load(self) -> None:
        """Starts the counting of `expert_load` anew, on the current stream. The count is of the workspace, so of all its layers."""
        self.session.workspace.local("load_total", torch.int64).zero_()

    def load_weights(self, w13: Tensor, w2: Tensor, *, w13_scale: Tensor | None = None, w2_scale: Tensor | None = None,
                     interleaved: bool = False, transposed: bool = False) -> None:
        """Takes this rank's weights, as MoELayer.load_weights, from the layer's device; keeps a copy in the kernels' layout.

        An e4m3 layer takes bfloat16 weights, which it quantises, or e4m3 weights with w13_scale [E_local, 2I/128, H/128] and
        w2_scale [E_local, H/128, I/128], float32: value = weight * scale, as in the checkpoints of DeepSeek-V3 (weight_scale_inv).
        """
        experts, inter, hidden = self.num_local_experts, self.local_intermediate, self.hidden_size
        first, second = (experts, 2 * inter, hidden), (experts, hidden, inter)
        if transposed:
            first, second = (experts, hidden, 2 * inter), (experts, inter, hidden)
        dtypes = DTYPES if self.dtype == E4M3 else (self.dtype,)
        check_tensor("w13", w13, dtypes=dtypes, shape=first, device=self.device,
                     layout="[E_local, H, 2I]" if transposed else "[E_local, 2I, H]")
        check_tensor("w2", w2, dtypes=dtypes, shape=second, device=self.device,
                     layout="[E_local, I, H]" if transposed else "[E_local, H, I]")
        scales = self._check_weight_scales(w13, w2, w13_scale, w2_scale, interleaved, transposed)
        with torch.cuda.device(self.device):
            weights = from_checkpoint(w13.detach(), w2.detach(), interleaved=interleaved, transposed=transposed)
            self._calls.load_weights(*weights, *scales)

    def _check_weight_scales(self, w13: Tensor, w2: Tensor, w13_scale: Tensor | None, w2_scale: Tensor | None, interleaved: bool,
                             transposed: bool) -> tuple[Tensor | None, Tensor | None]:
        """Scales of both weights in the order of our layout, or None twice."""
        if w13.dtype != w2.dtype:
            raise ArgumentTypeError(f"w13 is {w13.dtype} and w2 is {w2.dtype}, wanted one dtype for both")
        options = dict(transposed=transposed, device=self.device)
        scales = check_scales("w13", w13, w13_scale, **options), check_scales("w2", w2, w2_scale, **options)
        if scales[0] is None or scales[1] is None:
            return None, None
        if interleaved:
            raise ArgumentError("interleaved is True with float8_e4m3fn weights: gate and up would share scales of 128 rows. Put "
                                "the gate rows first, or give bfloat16 weights")
        return tuple(scale.transpose(1, 2).contiguous() for scale in scales) if transposed else scales

    def __call__(self, hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor, *, out: Tensor | None = None,
                 hidden_scales: Tensor | None = None) -> Tensor:
        """MoELayer.__call__. An e4m3 layer quantises bfloat16 hidden_states [T, H] itself, or takes e4m3 ones with hidden_scales
        [T, H / 128] float32 (value = hidden * scale); the result is bfloat16."""
        if hidden_scales is None:
            return super().__call__(hidden_states, topk_ids, topk_weights, out=out)
        if torch.compiler.is_compiling():
            raise ArgumentError("hidden_scales are not taken under torch.compile: give bfloat16 hidden_states there")
        return self.forward_into(hidden_states, topk_ids, topk_weights, out, hidden_scales)

    def forward_into(self, hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor, out: Tensor | None = None,
                     hidden_scales: Tensor | None = None) -> Tensor:
        """Launches a call on the current stream of the layer's device. Shapes as in MoELayer.__call__."""
        with self.session.one_call("moe_layer", self.timeout_s), torch.cuda.device(self.device):
            try:
                hidden, ids, weights, out = self._check_arguments(hidden_states, topk_ids, topk_weights, out)
                scales = self._check_hidden_scales(hidden, hidden_scales)
            except Exception as error:  # whatever keeps this rank from taking part, the others must hear of it
                too_many = hidden_states.shape[0] if isinstance(error, CapacityError) else 0
                self._calls.refuse(self._signature, num_tokens=too_many)
                self.session.forget_verdict()
                raise
            self._calls.forward(hidden, ids, weights, out, signature=self._signature, hidden_scales=scales)
        return out

    def synchronize(self) -> None:
        """Waits for the calls on the current stream; raises ProtocolTimeout, PeerLost, PeerRefused, CapacityError or MoETkError
        when one of them failed. Bounded, since every wait of a call is."""
        self.session.synchronize("moe_layer", self.timeout_s)

    def _check_arguments(self, hidden_states: Any, topk_ids: Any, topk_weights: Any,
                         out: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        if self._calls.w13 is None:
            raise ArgumentError("the layer has no weights: call load_weights(w13, w2) first")
        dtypes = DTYPES if self.dtype == E4M3 else (self.dtype,)
        hidden = check_tensor("hidden_states", hidden_states, dtypes=dtypes, shape=(None, self.hidden_size), layout="[T, H]",
                              device=self.device)
        tokens = hidden.shape[0]
        if tokens > self.max_tokens_per_rank:
            raise too_many_tokens("moe_layer", self.group.rank, tokens, self.max_tokens_per_rank)
        ids, weights = check_routing_tensors(topk_ids, topk_weights, num_tokens=tokens, top_k=self.top_k, device=self.device)
        if out is None:
            out = torch.empty(tokens, self.hidden_size, dtype=torch.bfloat16, device=self.device)
        check_tensor("out", out, dtypes=(torch.bfloat16,), shape=(tokens, self.hidden_size), layout="[T, H]", device=self.device)
        if not out.is_contiguous() or out.data_ptr() % 16:
            raise ArgumentError(f"out has strides {out.stride()} and address {out.data_ptr():#x}, wanted a contiguous tensor at a "
                                "multiple of 16 bytes")
        hidden = as_contiguous("hidden_states", hidden)
        return hidden if hidden.data_ptr() % 16 == 0 else hidden.clone(), ids.contiguous(), weights.contiguous(), out

    def _check_hidden_scales(self, hidden: Tensor, scales: Any) -> Tensor | None:
        """The scales of e4m3 hidden states, contiguous; None for bfloat16."""
        if hidden.dtype != E4M3:
            if scales is not None:
                raise ArgumentError(f"hidden_scales are given, but hidden_states are {hidden.dtype}: scales belong to "
                                    "float8_e4m3fn")
            return None
        if scales is None:
            raise ArgumentError("hidden_states are float8_e4m3fn, so hidden_scales [T, H/128] float32 are wanted; or give bfloat16")
        return check_tensor("hidden_scales", scales, dtypes=(torch.float32,), shape=(hidden.shape[0], self.hidden_size // 128),
                            layout="[T, H/128]", device=self.device).contiguous()


def own_device(group: RankGroup, device: torch.device | str | int | None) -> torch.device:
    """The GPU of this rank, with its index. Raises TopologyError where there is none that the kernels run on."""
    if not torch.cuda.is_available():
        raise TopologyError("protocol 'nvlink' wants a GPU, but torch sees none: use protocol='shm' for the CPU back end")
    if device is None or isinstance(device, int):
        device = torch.device("cuda", torch.cuda.current_device() if device is None else device)
    chosen = torch.device(device)
    if chosen.type != "cuda":
        raise TopologyError(f"device is {chosen}, wanted a CUDA device for protocol 'nvlink' on rank {group.rank}")
    if chosen.index is None:
        chosen = torch.device("cuda", torch.cuda.current_device())
    capability = torch.cuda.get_device_capability(chosen)
    if capability != (9, 0):
        raise TopologyError(f"{chosen} has compute capability {capability[0]}.{capability[1]}, wanted 9.0 (Hopper) for protocol "
                            "'nvlink'")
    return chosen
