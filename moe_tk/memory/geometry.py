"""The sizes that a workspace is made for. Everything that is allocated follows from these and nothing else."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass

from moe_tk.errors import ArgumentError
from moe_tk.schedule import max_segment_blocks, max_slots

ITEM_BYTES = {"bfloat16": 2, "float32": 4}
MAX_RANKS = 63  # contributors are bits of a non-negative int64
RING_WARMUP = 8  # row blocks by which Linear 2 may follow Linear 1 in a ring; each costs one row block of memory


@dataclass(frozen=True)
class Geometry:
    """Sizes of one workspace; equal on all ranks except where a field says "of this rank".

    ring_segments = 0 keeps every row block of a call; n > 0 keeps the blocks of n segments (mega's ring pool).
    """

    world: int
    max_tokens: int            # per rank
    top_k: int
    num_experts: int
    num_local_experts: int     # of this rank
    hidden: int                # width of a gathered row
    intermediate: int          # of this rank: output columns of GEMM 1, depth of GEMM 2; 0 = no such GEMM
    out_width: int             # output columns of GEMM 2; 0 = no such GEMM
    dtype: str                 # "bfloat16" | "float32"
    mode: str                  # "ep" | "tp"
    row_block: int = 32
    segments: int = 1
    ring_segments: int = 0
    job_chunk: int = 32
    send_chunk: int = 32
    gathers: bool = True       # has a gather-GEMM side: arrivals, gathered
    scatters: bool = True      # has a GEMM-scatter side: planes, expert_out

    def __post_init__(self) -> None:
        if not 1 <= self.world <= MAX_RANKS:
            raise ArgumentError(f"world is {self.world}, wanted 1..{MAX_RANKS}")
        if self.dtype not in ITEM_BYTES:
            raise ArgumentError(f"dtype is {self.dtype}, wanted one of {', '.join(ITEM_BYTES)}")
        if self.ring_segments == 1 and self.segments > 1:
            raise ArgumentError("ring_segments is 1, wanted 0 (no ring) or at least 2: one to fill while one is combined")

    @property
    def item_bytes(self) -> int:
        return ITEM_BYTES[self.dtype]

    @property
    def max_blocks(self) -> int:
        """Row blocks of one call on this rank, for any routing."""
        return max_slots(self.world, self.max_tokens, self.top_k, self.num_local_experts, self.segments,
                         self.row_block) // self.row_block

    @property
    def ring_blocks(self) -> int:
        """Row blocks that are held at a time: with a ring, its segments at their largest and room for the warm-up."""
        if self.ring_segments == 0:
            return self.max_blocks
        return min(self.max_blocks, self._segment_blocks * self.ring_segments + RING_WARMUP - 1)

    @property
    def _segment_blocks(self) -> int:
        """Row blocks of one segment at its largest."""
        return max_segment_blocks(self.world, self.max_tokens, self.top_k, self.num_local_experts, self.segments, self.row_block)

    @property
    def max_warmup(self) -> int:
        """Row blocks by which Linear 2 may follow Linear 1 in mega; more could deadlock in a ring.

        A row of segment s that waits for an entry may keep all rows of s from being placed, so no Linear 1 task of s may come
        before the Linear 2 tasks that free the entry. Those end with the last block of an earlier segment q. As q and s have
        at most `one` block each, a distance of ring_blocks between two of their blocks leaves at least ring_blocks - 2 * one
        + 1 blocks between q and s, and Linear 2 of q's last block comes warmup blocks after it.
        """
        if self.ring_blocks == self.max_blocks:
            return max(1, self.max_blocks)
        return self.ring_blocks - 2 * self._segment_blocks + 1

    @property
    def send_chunks(self) -> int:
        return max(1, -(-self.max_tokens // self.send_chunk))

    @property
    def job_chunks(self) -> int:
        return max(1, -(-self.max_tokens // self.job_chunk))

    def shared_key(self) -> str:
        """Hash of the fields that must be equal on all ranks (16 hex digits)."""
        fields = {k: v for k, v in asdict(self).items() if k not in ("num_local_experts", "intermediate")}
        return hashlib.sha256(repr(sorted(fields.items())).encode()).hexdigest()[:16]
