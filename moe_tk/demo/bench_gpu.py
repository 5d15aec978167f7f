"""Calls of one layer on a GPU: timed by CUDA events, several between two of them, every result checked."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import torch
from torch import Tensor

from moe_tk.demo.input import LayerInput
from moe_tk.demo.records import PatternRecord
from moe_tk.layer import MoELayer

BATCH = 20  # calls between two events, so that what is timed is the GPU and not the launch of a call
MEET_LIMIT_S = 60.0


@dataclass
class GpuBench:
    """One layer and what its calls gave. `seconds` are per call."""

    layer: MoELayer
    mine: LayerInput
    want: Tensor  # [T, H] float64, on the CPU
    errors: list[float] = field(default_factory=list)
    shipped_errors: list[float] = field(default_factory=list)
    digests: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._inputs = [tensor.to(self.layer.device) for tensor in (self.mine.hidden, self.mine.ids, self.mine.weights)]
        self._outs = torch.empty(BATCH, *self.mine.hidden.shape, dtype=self.mine.hidden.dtype, device=self.layer.device)

    def call(self, kind: str) -> None:
        """BATCH checked calls; kind: "warm-up" or "timed"."""
        self._outs.fill_(float("nan"))  # a row that is not written shows
        torch.cuda.synchronize(self.layer.device)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.layer.group.gather(None, timeout_s=MEET_LIMIT_S, step="demo: meet")
        self.layer(*self._inputs, out=self._outs[0])  # behind it ranks are in step
        begin.record()
        for out in self._outs[1:]:
            self.layer(*self._inputs, out=out)
        end.record()
        self.layer.synchronize()
        for out in self._outs.cpu():
            self._check(out)
        if kind == "timed":
            self.seconds.append(begin.elapsed_time(end) * 1e-3 / (BATCH - 1))

    def _check(self, out: Tensor) -> None:
        digest = hashlib.sha256(out.view(torch.int16).numpy().tobytes()).hexdigest()[:16]
        if not self.digests or digest != self.digests[-1]:  # the same bits have the same error
            self.errors.append(float((out.double() - self.want).square().sum()))
            self.shipped_errors.append(float((out.double() - self.mine.shipped.double()).square().sum()))
        self.digests.append(digest)

    def record(self) -> PatternRecord:
        """What is not counted on GPUs is left empty."""
        return PatternRecord(
            error_squared=worst(self.errors), reference_squared=float(self.want.square().sum()),
            shipped_error_squared=worst(self.shipped_errors), shipped_squared=float(self.mine.shipped.double().square().sum()),
            digests=self.digests, seconds=self.seconds, bytes_dispatched=[], bytes_combined=[], wait_s={}, busy_s={}, trace=[])


def worst(values: list[float]) -> float:
    """The largest; NaN if any is."""
    return max(values, key=lambda value: float("inf") if value != value else value)
