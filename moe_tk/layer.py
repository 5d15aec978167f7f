"""MoELayer: the whole layer behind one call, EP or TP, on the back end that its protocol asks for."""

from __future__ import annotations

from abc import ABCMeta
from typing import Any

from moe_tk.config import env
from moe_tk.cpu_layer import CpuMoELayer


def layer_class(protocol: str) -> type[CpuMoELayer]:
    """The class behind a protocol: CudaMoELayer for "nvlink" (or MOE_TK_PROTOCOL=nvlink with "auto"), else CpuMoELayer."""
    if (env("MOE_TK_PROTOCOL") if protocol == "auto" else protocol) != "nvlink":
        return CpuMoELayer
    from moe_tk.cuda_layer import CudaMoELayer  # only where it is wanted: it loads the CUDA side

    return CudaMoELayer


class MoELayer(CpuMoELayer, metaclass=ABCMeta):
    """A Mixture-of-Experts layer over the ranks of a group: y = sum over k of weight * expert(x).

    Arguments and calls: CpuMoELayer. protocol="nvlink" (or MOE_TK_PROTOCOL=nvlink with "auto") makes a CudaMoELayer
    instead, which counts as a MoELayer; see moe_tk.cuda_layer.
    """

    def __new__(cls, *args: Any, **options: Any) -> Any:
        chosen = layer_class(options.get("protocol", "auto"))
        if chosen is CpuMoELayer:
            return super().__new__(cls)
        MoELayer.register(chosen)
        return chosen(*args, **options)
