"""Sessions of moe_tk.ops over NVLink: workspaces of the dense and the routed operations with their launches."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_tk.errors import BuildError
from moe_tk.memory.layout import Item
from moe_tk.memory.nvlink import NvlinkWorkspace
from moe_tk.memory.nvlink_layout import symmetric_items, table_items
from moe_tk.memory.nvlink_ops_layout import (
    DENSE_ROW_BLOCKS,
    DENSE_WORDS,
    DenseGeometry,
    RoutedOpsGeometry,
    ScaledDenseGeometry,
    dense_symmetric_items,
    dense_table_items,
    routed_row_items,
    scaled_dense_row_items,
)
from moe_tk.runtime.nvlink import nvlink_module
from moe_tk.runtime.nvlink_session import NvlinkSession, NvlinkSessionCache

OPEN = 1                       # nvlink::dense_stage and nvlink::routed_stage
DENSE_RUN, DENSE_SEAL = 2, 4
ROUTED_GATHER, ROUTED_SCATTER, ROUTED_HAND_OUT, ROUTED_PRODUCT = 2, 4, 8, 16
SMALL_PART = 64                # rows of a part up to which row blocks of 64 are used


class DenseWorkspace(NvlinkWorkspace):
    """Memory of ag_gemm or gemm_rs of one size."""

    @staticmethod
    def items_of(geometry: Any) -> tuple[tuple[Item, ...], tuple[Item, ...], tuple[Item, ...]]:
        return dense_symmetric_items(geometry), dense_table_items(geometry), ()

    def fields(self, num_sms: int) -> dict[str, Any]:
        """Fields of nvlink::dense_view."""
        g: Any = self.geometry
        local = {name: buffer.data_ptr() + item.offset for name, (buffer, item) in self._local.items()}
        return {**local, **{name: item.offset for name, item in self._symmetric.items()}, "bases": self.heap.bases,
                "mailbox": self.mailbox.data_ptr(), "rank": g.rank, "max_tokens": g.max_tokens, "hidden": g.width,
                "max_blocks": g.max_blocks, "max_columns": g.columns, "num_sms": num_sms}

    def poison(self) -> None:
        """Fills the planes with NaN: what the next call does not write itself must not matter (for tests)."""
        self.region("planes", torch.bfloat16).fill_(float("nan"))


class RoutedOpsWorkspace(NvlinkWorkspace):
    """Memory of the routed operations of one size: a layer's without the activation."""

    @staticmethod
    def items_of(geometry: Any) -> tuple[tuple[Item, ...], tuple[Item, ...], tuple[Item, ...]]:
        return symmetric_items(geometry), table_items(geometry), routed_row_items(geometry)


class ScaledDenseWorkspace(NvlinkWorkspace):
    """Memory of ag_gemm or gemm_rs in e4m3 of one size."""

    @staticmethod
    def items_of(geometry: Any) -> tuple[tuple[Item, ...], tuple[Item, ...], tuple[Item, ...]]:
        return symmetric_items(geometry), table_items(geometry), scaled_dense_row_items(geometry)


class DenseSession(NvlinkSession):
    """Calls of ag_gemm or gemm_rs on one workspace."""

    WORKSPACE, NATIVE = DenseWorkspace, "DenseWorkspace"

    def call(self, x: Tensor, weight: Tensor, out: Tensor, *, num_tokens: int, signature: int, stages: int, timeout_s: float,
             stream: torch.cuda.Stream) -> None:
        """Launches a call. num_tokens: rows of a part; x [.., K], weight [N, K], out [.., N]: contiguous, on the device."""
        self._run({"x": x.data_ptr(), "weight": weight.data_ptr(), "out": out.data_ptr(), "signature": signature,
                   "num_tokens": num_tokens, "refused": False, "variant": int(num_tokens > SMALL_PART), "k": weight.shape[1],
                   "n": weight.shape[0]}, stages, timeout_s, stream)

    def refuse(self, *, timeout_s: float, stream: torch.cuda.Stream) -> None:
        """Tells the other ranks that this one does not make the call; they get PeerRefused."""
        self._run({"x": 0, "weight": 0, "out": 0, "signature": 0, "num_tokens": 0, "refused": True, "variant": 0, "k": 0, "n": 0},
                  OPEN, timeout_s, stream)

    def _run(self, call: dict[str, Any], stages: int, timeout_s: float, stream: torch.cuda.Stream) -> None:
        self.native.run(call, gathers=self.geometry.gathers, stages=stages, timeout_s=timeout_s, stream=stream.cuda_stream)


class RoutedOpsSession(NvlinkSession):
    """Calls of dispatch_gemm, gemm_combine and mega_moe on one workspace, in bfloat16 or e4m3 as its geometry says."""

    WORKSPACE, NATIVE = RoutedOpsWorkspace, "RoutedWorkspace"

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        g = self.geometry
        self.ones = torch.ones(g.max_tokens * g.top_k, device=self.device)  # weights of a call that gives none

    def call(self, fields: dict[str, Any], *, stages: int, timeout_s: float, stream: torch.cuda.Stream) -> None:
        """Launches a call from its tensors and numbers; tensors that a stage does not use may be missing."""
        nothing = dict.fromkeys(("hidden_states", "hidden_scales", "topk_ids", "topk_weights", "out", "w13", "w13_scales", "w2",
                                 "w2_scales", "activated", "activated_scales", "expert_offsets", "slots_out", "num_tokens",
                                 "variant", "rows", "row_bytes", "stride", "scales_stride", "signature"), 0)
        plain = {"refused": False, "ids_are_64": False, "weights_are_bf16": False, "weights_before_l2": False, "alpha": 1.0,
                 "beta": 0.0, "limit": float("inf")}
        values = {name: value.data_ptr() if isinstance(value, Tensor) else value for name, value in fields.items()}
        if not values.get("activated"):  # a tensor without rows has no address, and descriptors want one
            values["activated"] = self.workspace.local("slot_rows", torch.bfloat16).data_ptr()
        self.native.run({**nothing, **plain, **values}, stages=stages, timeout_s=timeout_s, stream=stream.cuda_stream)

    def refuse(self, *, timeout_s: float, stream: torch.cuda.Stream) -> None:
        """Tells the other ranks that this one does not make the call; they get PeerRefused."""
        self.call({"refused": True}, stages=OPEN, timeout_s=timeout_s, stream=stream)


class ScaledDenseSession(RoutedOpsSession):
    """Calls of ag_gemm or gemm_rs in e4m3 on one workspace."""

    WORKSPACE = ScaledDenseWorkspace

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.zeros = torch.zeros(self.geometry.max_tokens, 1, dtype=torch.int32, device=self.device)  # the expert of every row


OpsGeometry = DenseGeometry | RoutedOpsGeometry | ScaledDenseGeometry
OpsSession = DenseSession | RoutedOpsSession  # of which ScaledDenseSession is one
SESSIONS = {DenseGeometry: NvlinkSessionCache(DenseSession), RoutedOpsGeometry: NvlinkSessionCache(RoutedOpsSession),
            ScaledDenseGeometry: NvlinkSessionCache(ScaledDenseSession)}


def make_session(group: Any, geometry: OpsGeometry, *, device: torch.device, timeout_s: float) -> OpsSession:
    """A new session. A collective: all ranks make it together."""
    have = (tuple(nvlink_module().DENSE_ROW_BLOCKS), nvlink_module().NUM_DENSE_WORDS)
    if have != (DENSE_ROW_BLOCKS, DENSE_WORDS):
        raise BuildError(f"the NVLink module has {have}, this package expects {(DENSE_ROW_BLOCKS, DENSE_WORDS)}: clear the module "
                         "cache")
    return SESSIONS[type(geometry)].get(group, geometry, device=device, reserve_sms=0)
