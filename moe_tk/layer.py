"""MoELayer: the whole layer behind one call, EP or TP, on the back end that moe_tk.back_end chooses."""

from __future__ import annotations

from abc import ABCMeta
from dataclasses import replace
from typing import Any

from moe_tk.back_end import decide_back_end
from moe_tk.cpu_layer import CpuMoELayer
from moe_tk.planner.back_end import BackEnd


def _with_reason(layer: CpuMoELayer, chosen: BackEnd) -> None:
    if chosen.reason:
        layer.plan = replace(layer.plan, reasons=(chosen.reason, *layer.plan.reasons))


class MoELayer(CpuMoELayer, metaclass=ABCMeta):
    """A Mixture-of-Experts layer over the ranks of a group: y = sum over k of weight * expert(x).

    Arguments and calls: CpuMoELayer. On the CUDA back end it makes a CudaMoELayer instead, which counts as a MoELayer and takes
    device=, row_block= and reserve_sms= besides; see moe_tk.cuda_layer. That is where protocol="nvlink" asks for it (or
    MOE_TK_PROTOCOL=nvlink with "auto"), and with "auto" where device= names a GPU, or the group has an nccl back end, and all
    ranks are on Hopper GPUs of one machine with NVLink between every two. device="cpu" keeps "auto" on the CPU.
    """

    def __new__(cls, group: Any = None, **options: Any) -> Any:
        chosen = decide_back_end(group, options)
        if chosen.protocol != "nvlink":
            layer = super().__new__(cls)
            layer._chosen = chosen
            return layer
        from moe_tk.cuda_layer import CudaMoELayer  # only where it is wanted: it loads the CUDA side

        MoELayer.register(CudaMoELayer)
        layer = CudaMoELayer(group, **options)
        _with_reason(layer, chosen)
        return layer

    def __init__(self, group: Any = None, **options: Any) -> None:
        options.pop("device", None)  # the CPU's, or MoELayer.__new__ would have made another layer
        super().__init__(group, **options)
        _with_reason(self, self._chosen)
