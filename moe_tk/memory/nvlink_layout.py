"""Sizes and regions of a workspace over NVLink: what is symmetric, what is local, each item with its meaning."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass, field

from moe_tk.errors import ArgumentError
from moe_tk.memory.layout import CONTROL_BYTES, Item, MemoryEstimate, place
from moe_tk.schedule import local_experts, max_slots, shard_range
from moe_tk.schedule.capacity import ceil_div

ROW_BLOCKS = (64, 128)     # of the compiled GEMMs; a call uses one of them
MIN_COLUMN_BLOCK = 128     # of the compiled GEMMs: room for their task lists
FUSED_COLUMN_BLOCK = 256   # of the fused ones among them, where they are not narrower
JOB_CHUNK = 32             # tokens between two watermarks
MAX_GROUPS = 1536          # segments * local experts; checked against the module when it is loaded
OPEN_CLUSTER = 8           # blocks that build the tables; checked too
MAX_TOKENS = 2**21         # of all ranks; checked too
FLAG_LINE_BYTES = 128      # one flag of one writer
HEADER_BYTES = 16
MAX_COL_GROUPS = 4         # groups of column blocks of GEMM 2; checked against the module
MAX_TOP_K = 32             # a warp's lane per choice
MAX_WORLD = 32             # a warp's lane per rank
INT32_MAX = 2**31 - 1
SCALE_BLOCK = 128          # e4m3: columns of a row, and rows and columns of a weight, under one scale
DTYPES = ("bfloat16", "float8_e4m3fn")


@dataclass(frozen=True)
class NvlinkGeometry:
    """Sizes of one workspace; equal on all ranks except the fields "of this rank". dtype is that of the rows that travel and of
    the weights; results and partial sums are bfloat16."""

    world: int
    rank: int
    max_tokens: int        # per rank: the row stride of the tables
    top_k: int
    num_experts: int
    hidden: int
    intermediate_size: int  # of the layer
    mode: str              # "ep" | "tp"
    max_segments: int      # of one call
    dtype: str = field(default="bfloat16", kw_only=True)  # | "float8_e4m3fn"

    def __post_init__(self) -> None:
        if not 1 <= self.world <= MAX_WORLD:
            raise ArgumentError(f"world is {self.world}, wanted 1..{MAX_WORLD}")
        if self.top_k > MAX_TOP_K:
            raise ArgumentError(f"top_k is {self.top_k}, wanted 1..{MAX_TOP_K} on the CUDA back end")
        groups = self.max_segments * self.num_local_experts
        if groups > MAX_GROUPS:
            raise ArgumentError(f"{self.max_segments} segment(s) of {self.num_local_experts} local experts are {groups} groups, "
                                f"wanted at most {MAX_GROUPS}: use fewer segments, or more ranks in mode 'ep'")
        if self.max_slots * max(self.hidden // 8, 1) > INT32_MAX:
            raise ArgumentError(f"max_tokens_per_rank is {self.max_tokens}: {self.max_slots} slots of {self.hidden} elements are "
                                "more than the kernels can index; use fewer tokens per call")
        if self.world * self.max_tokens > MAX_TOKENS:
            raise ArgumentError(f"max_tokens_per_rank is {self.max_tokens}: {self.world} ranks would have "
                                f"{self.world * self.max_tokens} tokens, wanted at most {MAX_TOKENS}; use fewer tokens per call")
        if self.dtype not in DTYPES:
            raise ArgumentError(f"dtype is {self.dtype}, wanted one of {', '.join(DTYPES)} on the CUDA back end")
        if self.quantised:
            self._check_scale_blocks()

    def _check_scale_blocks(self) -> None:
        """Raises ArgumentError where the blocks of scales do not fit the sizes of every rank."""
        for name, (size, multiple, why) in self._scaled_sizes().items():
            if size % multiple:
                near = [value for value in (size // multiple * multiple, (size // multiple + 1) * multiple) if value]
                raise ArgumentError(f"{name} is {size}; with dtype float8_e4m3fn it must be a multiple of {multiple}{why}, since a "
                                    f"scale covers {SCALE_BLOCK} columns; nearest: {' or '.join(map(str, near))}")

    def _scaled_sizes(self) -> dict[str, tuple[int, int, str]]:
        """Sizes that scales must fit, by name: (size, wanted multiple, why)."""
        step = SCALE_BLOCK * (self.world if self.mode == "tp" else 1)
        return {"hidden_size": (self.hidden, SCALE_BLOCK, ""),
                "intermediate_size": (self.intermediate_size, step, " (128 for each rank)" if step > SCALE_BLOCK else "")}

    @property
    def quantised(self) -> bool:
        """Rows and weights are e4m3 with scales."""
        return self.dtype == "float8_e4m3fn"

    @property
    def row_bytes(self) -> int:
        """Between two exported rows: H bfloat16, or H e4m3 and their H / 128 float32 scales, rounded up to 128."""
        if not self.quantised:
            return 2 * self.hidden
        return ceil_div(self.hidden + 4 * (self.hidden // SCALE_BLOCK), 128) * 128

    @property
    def row_senders(self) -> int:
        """Ranks whose rows are written here. e4m3 rows are quantised, and so written, for this rank too."""
        return self.world if self.quantised else self.world - 1

    @property
    def partial_senders(self) -> int:
        """Ranks whose partial rows are written here."""
        return self.world

    @property
    def num_local_experts(self) -> int:
        """Experts of this rank."""
        return local_experts(self.num_experts, self.world, self.rank, self.mode)[1]

    @property
    def first_expert(self) -> int:
        """Global id of local expert 0."""
        return local_experts(self.num_experts, self.world, self.rank, self.mode)[0]

    @property
    def local_intermediate(self) -> int:
        """Intermediate columns of this rank: all in EP, its share in TP."""
        return self.intermediate_size if self.mode == "ep" else shard_range(self.intermediate_size, self.world, self.rank)[1]

    @property
    def padded_intermediate(self) -> int:
        """The same, rounded up to the 8 columns of a bulk copy; the added ones are zero."""
        return ceil_div(self.local_intermediate, 8) * 8

    def _slots(self, row_block: int) -> int:
        return max_slots(self.world, self.max_tokens, self.top_k, self.num_local_experts, self.max_segments, row_block)

    @property
    def max_slots(self) -> int:
        """Slots of one call on this rank, for any routing and either row block; at least one row block."""
        return max(ROW_BLOCKS[-1], *(self._slots(row_block) for row_block in ROW_BLOCKS))

    @property
    def max_blocks(self) -> int:
        """Row blocks of one call on this rank, for any routing and either row block."""
        return max(1, *(self._slots(row_block) // row_block for row_block in ROW_BLOCKS))

    @property
    def job_chunks(self) -> int:
        return max(1, ceil_div(self.max_tokens, JOB_CHUNK))

    def shared_key(self) -> str:
        """Hash of the fields that must be equal on all ranks (16 hex digits)."""
        fields = {k: v for k, v in asdict(self).items() if k != "rank"}
        return hashlib.sha256(repr(sorted(fields.items())).encode()).hexdigest()[:16]


def symmetric_items(g: NvlinkGeometry) -> tuple[Item, ...]:
    """Regions of one rank's segment. Fields of nvlink::heap_offsets."""
    return place([
        ("control", (CONTROL_BYTES,), 1, "abort flag and wait records of every rank"),
        ("headers", (2, g.world, HEADER_BYTES), 1, "what each rank says about its call"),
        ("posted", (g.world, FLAG_LINE_BYTES), 1, "epoch of each header"),
        ("rows_posted", (g.world, FLAG_LINE_BYTES), 1, "epoch of the rows of each rank"),
        ("routing", (2, g.world, g.max_tokens, g.top_k), 8, "expert and weight of each pair of all ranks"),
        ("rows", (g.row_senders, g.max_tokens, g.row_bytes), 1, "tokens that have work here (e4m3: with their scales), by owner"),
        ("combined", (g.world, g.job_chunks, MAX_COL_GROUPS), 4, "watermark of each chunk of partial rows, by column group"),
        ("planes", (g.partial_senders, g.max_tokens, g.hidden), 2, "partial rows from each rank"),
    ])


def table_items(g: NvlinkGeometry) -> tuple[Item, ...]:
    """Tables and counters of one rank. Fields of nvlink::table_view, counter_view and workspace_view."""
    rows, groups = g.world * g.max_tokens, g.max_segments * g.num_local_experts
    return place([
        ("epoch", (1,), 4, "number of the call"),
        ("blocks_done", (1,), 4, "blocks of open_call that are done"),
        ("copies_done", (1,), 4, "blocks that have sent their rows"),
        ("routing_sent", (1,), 4, "epoch of the routing that this rank has sent"),
        ("record_claim", (1,), 4, "whether a wait record was filed"),
        ("next_item", (1,), 4, "dispenser of jobs and tokens"),
        ("counts", (5,), 4, "slots, row blocks, jobs, tasks of both GEMMs"),
        ("token_counts", (g.world,), 4, "tokens of each rank"),
        ("expert_offsets", (groups + 1,), 4, "first slot of each group"),
        ("expert_load", (max(1, g.num_local_experts),), 4, "rows of each local expert"),
        ("load_total", (max(1, g.num_local_experts),), 8, "... since it was reset"),
        ("slots", (rows, g.top_k), 4, "slot of each pair"),
        ("slot_pair", (g.max_slots,), 4, "pair of each slot"),
        ("slot_weight", (g.max_slots,), 4, "routing weight of each slot"),
        ("block_target", (g.max_blocks,), 4, "rows of each row block"),
        ("block_group", (g.max_blocks,), 4, "group of each row block"),
        ("tasks1", (g.max_blocks * ceil_div(2 * g.padded_intermediate, MIN_COLUMN_BLOCK), 4), 4, "tiles of GEMM 1 in order"),
        ("tasks2", (g.max_blocks * ceil_div(g.hidden, MIN_COLUMN_BLOCK), 4), 4, "tiles of GEMM 2 in order"),
        ("job_order", (rows,), 4, "rows by largest slot"),
        ("chunk_expected", (g.world, g.job_chunks), 4, "jobs of each chunk"),
        ("contributors", (g.max_tokens,), 8, "ranks with work for each own token"),
        ("l1_done", (g.max_blocks,), 4, "column blocks of GEMM 1"),
        ("l2_done", (g.max_blocks, MAX_COL_GROUPS), 4, "column blocks of GEMM 2"),
        ("job_done", (g.world, g.job_chunks, MAX_COL_GROUPS), 4, "jobs pushed"),
    ])


def row_items(g: NvlinkGeometry) -> tuple[Item, ...]:
    """Work buffers of one rank. GEMM 1 of a fused call reads rows where they lie or, in large e4m3 calls, each in the place of
    its output; a serial call gathers them in slot_rows or, in e4m3, in the front of expert_out, which GEMM 2 writes later."""
    if g.quantised:
        return place([
            ("activated", (g.max_slots, g.padded_intermediate), 1, "output of GEMM 1"),
            ("activated_scales", (g.padded_intermediate // SCALE_BLOCK, g.max_slots), 4, "its scales"),
            ("expert_out", (g.max_slots, g.hidden), 2, "the experts' outputs; before that rows in slots and scales"),
        ])
    return place([
        ("slot_rows", (g.max_slots, g.hidden), 2, "the experts' outputs; before that a serial call's gathered rows"),
        ("activated", (g.max_slots, g.padded_intermediate), 2, "output of GEMM 1"),
    ])


def slot_scales_offset(g: NvlinkGeometry) -> int:
    """Where in expert_out the scales [H / 128, max_slots] of a serial call's e4m3 rows begin: behind the rows [max_slots, H]."""
    return g.max_slots * g.hidden


def nvlink_estimate(g: NvlinkGeometry) -> MemoryEstimate:
    """Device memory of a workspace on this rank, itemised; equal to what is allocated."""
    return MemoryEstimate(symmetric_items(g), table_items(g), row_items(g))
