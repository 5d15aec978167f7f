"""Calls of the ops in e4m3 that end before the launch, on machines that may have no GPU: right arguments, fake sessions."""

from __future__ import annotations

import re
from types import SimpleNamespace

import torch

from moe_tk import ops
from moe_tk.builder.native_root import native_root
from moe_tk.group import SINGLE
from moe_tk.ops import cuda_functional
from moe_tk.runtime.nvlink_ops import ROUTED_GATHER, ROUTED_PRODUCT, RoutedOpsSession

E4M3 = torch.float8_e4m3fn

CPU = torch.device("cpu")

HIDDEN, INTER, EXPERTS, TOKENS, ROWS = 256, 128, 6, 9, 64 * (1 + 6)


def checkpoint(experts: int = EXPERTS, inter: int = INTER, hidden: int = HIDDEN) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(7)
    return (torch.randn(experts, 2 * inter, hidden, generator=draw).bfloat16(),
            torch.randn(experts, hidden, inter, generator=draw).bfloat16())


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8)


class FakeSession(RoutedOpsSession):
    """A session whose calls end before the launch; results are zeros."""

    def __init__(self, geometry) -> None:
        self.geometry, self.device, self.calls = geometry, CPU, []
        self.ones = torch.ones(geometry.max_tokens * geometry.top_k)
        self.zeros = torch.zeros(geometry.max_tokens, 1, dtype=torch.int32)
        self.workspace = SimpleNamespace(local=lambda name, dtype: torch.zeros(8, dtype=dtype))
        self.native = SimpleNamespace(run=lambda call, **options: self.calls.append((call, options)))

    def call(self, fields, *, stages, **options) -> None:
        given = ("activated", "activated_scales") if not stages & (ROUTED_GATHER | ROUTED_PRODUCT) else ()
        for name in {"activated", "activated_scales", "expert_offsets", "slots_out", "out"} & fields.keys() - set(given):
            bits(fields[name]).zero_()
        super().call(fields, stages=stages, **options)


class Arguments:
    """Of calls of one process, right in all."""

    def __init__(self, quantised_rows: bool = False, quantised: bool = True) -> None:
        w13, w2 = checkpoint()
        self.hidden, self.hidden_scales = torch.randn(TOKENS, HIDDEN).bfloat16(), None
        if quantised_rows:
            rows, scales = ops.quantise_rows(self.hidden)
            self.hidden, self.hidden_scales = rows, scales.t().contiguous()
        self.ids, self.weights = torch.randint(-1, 7, (TOKENS, 2)), torch.rand(TOKENS, 2)
        self.activated, self.activated_scales = torch.zeros(ROWS, INTER, dtype=torch.bfloat16), None
        self.kept = SimpleNamespace(w13=w13, w2=w2, w13_scales=None, w2_scales=None)
        if quantised:
            self.kept = SimpleNamespace(**vars(ops.scaled_weights(w13, w2)))
            self.activated, self.activated_scales = ops.quantise_rows(torch.randn(ROWS, INTER))

    def call(self, op: str, **changes):
        kept = self.kept
        common = dict(topk_ids=self.ids, topk_weights=self.weights, num_experts=EXPERTS, mode="ep", tokens_per_rank=None,
                      group=SINGLE, timeout_s=None)
        act = dict(activation="swiglu", swiglu_limit=None)
        rows = dict(hidden_states=self.hidden, hidden_scales=self.hidden_scales)
        first, second = dict(w13=kept.w13, w13_scales=kept.w13_scales), dict(w2=kept.w2, w2_scales=kept.w2_scales)
        arguments = {
            "dispatch_gemm": dict(**common, **act, **rows, **first),
            "gemm_combine": dict(**common, **second, activated=self.activated, activated_scales=self.activated_scales),
            "mega_moe": dict(**common, **act, **rows, **first, **second, weight_position="before_l2")}[op]
        return getattr(cuda_functional, op)(**{**arguments, **changes})


class Dense:
    """Arguments of ag_gemm or gemm_rs in one process, right in all; rows: of x."""

    def __init__(self, op: str, rows: int = TOKENS, columns: int = 264, quantised_rows: bool = True) -> None:
        self.op, (weight, scales) = op, ops.quantise_weights(torch.randn(1, columns, HIDDEN))
        self.weight, self.weight_scales = weight[0], ops.scale_pairs(scales)[0]
        self.x, self.x_scales = torch.randn(rows, HIDDEN).bfloat16(), None
        if quantised_rows:
            self.x, scales = ops.quantise_rows(self.x)
            self.x_scales = scales.t().contiguous() if op == "ag_gemm" else scales

    def call(self, **changes):
        values = {name: value for name, value in vars(self).items() if name != "op"}
        return getattr(cuda_functional, self.op)(group=SINGLE, timeout_s=None, **{**values, **changes})


def fields_of_binding() -> set[str]:
    """Names that nvlink_ops.cu takes out of a routed call."""
    source = (native_root() / "tk_kernels/bindings/nvlink_ops.cu").read_text().split('fields f(values, "routed call")')[1]
    return set(re.findall(r'f\.(?:get|pointer)<\w+>\("(\w+)"\)', source.split("f.done()")[0]))
