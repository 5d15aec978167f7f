"""Sizes and regions of the workspaces of moe_tk.ops over NVLink."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass
from typing import Any

from moe_tk.errors import ArgumentError
from moe_tk.memory.layout import CONTROL_BYTES, Item, place
from moe_tk.memory.nvlink_layout import (
    FLAG_LINE_BYTES,
    HEADER_BYTES,
    INT32_MAX,
    MAX_WORLD,
    MIN_COLUMN_BLOCK,
    SCALE_BLOCK,
    NvlinkGeometry,
)
from moe_tk.schedule.capacity import ceil_div

DENSE_ROW_BLOCKS = (64, 128)  # of the compiled dense GEMMs; checked against the module when a workspace is made
DENSE_WORDS = 4               # nvlink::dense_word


def _key(geometry: Any, own: tuple[str, ...]) -> str:
    fields = {name: value for name, value in asdict(geometry).items() if name not in own}
    return hashlib.sha256(repr((type(geometry).__name__, sorted(fields.items()))).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class RoutedOpsGeometry(NvlinkGeometry):
    """A workspace of dispatch_gemm, gemm_combine and mega_moe. `width` is I of this rank's weights, which no other rank needs
    to know; intermediate_size is not used."""

    width: int

    @property
    def local_intermediate(self) -> int:
        return self.width

    def _scaled_sizes(self) -> dict[str, tuple[int, int, str]]:
        return {"hidden_size": (self.hidden, SCALE_BLOCK, ""), "I of this rank": (self.width, SCALE_BLOCK, "")}

    def shared_key(self) -> str:
        """Hash of the fields that must be equal on all ranks (16 hex digits)."""
        return _key(self, ("rank", "width", "intermediate_size"))


def routed_row_items(g: RoutedOpsGeometry) -> tuple[Item, ...]:
    """Work buffers: the activation and, in e4m3, its scales are the caller's tensors."""
    return place([("slot_rows", (g.max_slots, g.hidden), 2, "the experts' outputs"),
                  ("activated", (0,), 2, "a tensor of the call")])


@dataclass(frozen=True)
class ScaledDenseGeometry(NvlinkGeometry):
    """A workspace of ag_gemm or gemm_rs in e4m3: that of one expert on every rank which wants all rows, so that slots are rows.
    hidden is H of ag_gemm, N of gemm_rs, which all ranks share; `columns` is the other side of this rank's weight."""

    columns: int   # N of ag_gemm, K of gemm_rs
    gathers: bool  # ag_gemm

    @classmethod
    def of(cls, *, world: int, rank: int, max_tokens: int, hidden: int, columns: int, gathers: bool) -> ScaledDenseGeometry:
        """max_tokens: rows of one rank's part."""
        return cls(world=world, rank=rank, max_tokens=max_tokens, top_k=1, num_experts=1, hidden=hidden, intermediate_size=0,
                   mode="tp", max_segments=1, dtype="float8_e4m3fn", columns=columns, gathers=gathers)

    def _scaled_sizes(self) -> dict[str, tuple[int, int, str]]:
        return {"H": (self.hidden, SCALE_BLOCK, "")} if self.gathers else {"K of this rank": (self.columns, SCALE_BLOCK, "")}

    @property
    def local_intermediate(self) -> int:
        """ag_gemm has N columns where a layer's GEMM 1 has 2 I."""
        return self.columns // 2 if self.gathers else self.columns

    @property
    def padded_intermediate(self) -> int:
        return self.local_intermediate  # weights are read as they are given

    @property
    def row_senders(self) -> int:
        return self.world if self.gathers else 0

    @property
    def partial_senders(self) -> int:
        return 0 if self.gathers else self.world

    def shared_key(self) -> str:
        """Hash of the fields that must be equal on all ranks (16 hex digits)."""
        return _key(self, ("rank", "columns", "intermediate_size"))


def scaled_dense_row_items(g: ScaledDenseGeometry) -> tuple[Item, ...]:
    """Work buffers of gemm_rs; ag_gemm has an address for descriptors that nobody reads by."""
    rows = (1, 8) if g.gathers else (g.max_slots, g.hidden)
    return place([("slot_rows", rows, 2, "this rank's products"), ("activated", (0,), 2, "a tensor of the call")])


@dataclass(frozen=True)
class DenseGeometry:
    """A workspace of ag_gemm (planes of the other ranks' rows, `width` = H) or gemm_rs (planes of partial rows, `width` = N)."""

    world: int
    rank: int
    max_tokens: int  # rows of one rank's part
    width: int       # elements of a plane's row
    columns: int     # of the product of this rank
    gathers: bool    # ag_gemm

    def __post_init__(self) -> None:
        if not 1 <= self.world <= MAX_WORLD:
            raise ArgumentError(f"world is {self.world}, wanted 1..{MAX_WORLD}")
        most = max(self.width, self.columns)
        if self.world * self.max_tokens * ceil_div(most, 8) > INT32_MAX:
            raise ArgumentError(f"{self.world} parts of {self.max_tokens} rows of {most} elements are more than the kernels can "
                                "index; use fewer rows per call")

    @property
    def max_blocks(self) -> int:
        """Row blocks of one part, at most."""
        return max(1, ceil_div(self.max_tokens, DENSE_ROW_BLOCKS[0]))

    def shared_key(self) -> str:
        """Hash of the fields that must be equal on all ranks (16 hex digits)."""
        return _key(self, ("rank", "columns"))


def dense_symmetric_items(g: DenseGeometry) -> tuple[Item, ...]:
    """Regions of one rank's segment: those of nvlink::heap_offsets that the dense operations use."""
    sources = 0 if g.gathers and g.world == 1 else g.world
    return place([
        ("control", (CONTROL_BYTES,), 1, "abort flag and wait records of every rank"),
        ("headers", (2, g.world, HEADER_BYTES), 1, "what each rank says about its call"),
        ("posted", (g.world, FLAG_LINE_BYTES), 1, "epoch of each header"),
        ("combined", (g.world, g.max_blocks), 4, "epoch of each row block of a plane"),
        ("planes", (sources, g.max_tokens, g.width), 2, "rows from each rank"),
    ])


def dense_table_items(g: DenseGeometry) -> tuple[Item, ...]:
    """Identity tables and counters of one rank. Fields of nvlink::dense_view."""
    blocks = g.world * g.max_blocks
    return place([
        ("epoch", (1,), 4, "number of the call"),
        ("record_claim", (1,), 4, "whether a wait record was filed"),
        ("words", (DENSE_WORDS,), 4, "tasks, whether the call is computed, dispensers"),
        ("tasks", (blocks * ceil_div(g.columns, MIN_COLUMN_BLOCK), 4), 4, "tiles in order"),
        ("block_rows", (blocks,), 4, "rows of each row block"),
        ("done", (blocks,), 4, "rows sent or column blocks finished"),
    ])
