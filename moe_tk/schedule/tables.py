"""The schedule tables of one rank, as one frozen record. Words: docs/schedule.md."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from moe_tk.errors import ScheduleError
from moe_tk.schedule.capacity import ceil_div


@dataclass(frozen=True, slots=True, eq=False)  # tensors: == would raise
class Tables:
    """Everything that one rank needs to move, compute and return the tokens of one call.

    R ranks, T = tokens_per_rank (row stride; rows t >= token_counts[r] are masked), k pairs per token,
    S segments, E_local experts here. Global token row = source_rank * T + t; pair = global row * k + j;
    group = segment * E_local + local expert. All tensors are int32 on one device, except `contributors` (int64).
    Lengths are exact when made by build_tables; build_padded leaves them at capacity, with -1 (block_target: 0)
    behind the last entry that counts.
    """

    world: int
    rank: int
    tokens_per_rank: int
    top_k: int
    num_experts: int         # of the layer
    num_local_experts: int   # of this rank: its share in EP, all in TP
    first_expert: int        # global id of local expert 0
    segments: int
    row_block: int           # slots per row block
    job_chunk: int           # tokens per watermark chunk
    mode: str                # "ep" | "tp"
    token_counts: Tensor     # [R] tokens of each source rank
    expert_offsets: Tensor   # [S * E_local + 1] first slot of each group, a multiple of row_block; last: all slots
    slots: Tensor            # [R * T, k] slot of each pair; -1: expert not here, invalid id, or masked row
    slot_pair: Tensor        # [n_slots] pair of each slot; -1: padding
    delivery_order: Tensor   # [n_pull] global token rows wanted here, by smallest slot
    block_target: Tensor     # [n_blocks] rows that must arrive before the block may start
    block_group: Tensor      # [n_blocks] group of each row block
    job_order: Tensor        # [n_jobs] global token rows with work here, by largest slot
    expected: Tensor         # [R] jobs of each source rank
    chunk_expected: Tensor   # [R, n_chunks] jobs of each (source rank, t // job_chunk)
    expert_load: Tensor      # [E_local] pairs of each local expert
    send_order: Tensor       # [R, T] own tokens wanted by each destination, by its smallest slot; then -1
    send_count: Tensor       # [R] own tokens wanted by each destination
    contributors: Tensor     # [T] int64; bit d: rank d has work for own token t

    def __post_init__(self) -> None:
        """Checks shapes, dtypes and devices (never values). Raises ScheduleError naming the table."""
        rows, slots, blocks = self.world * self.tokens_per_rank, self.slot_pair.numel(), self.block_group.numel()
        jobs = self.delivery_order.numel()
        wanted = {
            "token_counts": (self.world,), "expert_offsets": (self.num_groups + 1,), "slots": (rows, self.top_k),
            "slot_pair": (blocks * self.row_block,), "delivery_order": (jobs,), "block_target": (blocks,),
            "block_group": (blocks,), "job_order": (jobs,), "expected": (self.world,),
            "chunk_expected": (self.world, self.num_chunks), "expert_load": (self.num_local_experts,),
            "send_order": (self.world, self.tokens_per_rank), "send_count": (self.world,),
            "contributors": (self.tokens_per_rank,),
        }
        for name, shape in wanted.items():
            table = getattr(self, name)
            dtype = torch.int64 if name == "contributors" else torch.int32
            if tuple(table.shape) != shape:
                raise ScheduleError(f"{name} has shape {tuple(table.shape)}, wanted {shape} "
                                    f"({slots} slots, {blocks} row blocks of {self.row_block}, {jobs} jobs)")
            if table.dtype != dtype:
                raise ScheduleError(f"{name} has dtype {table.dtype}, wanted {dtype}")
            if table.device != self.slots.device:
                raise ScheduleError(f"{name} is on {table.device}, wanted {self.slots.device} like slots")

    @property
    def num_groups(self) -> int:
        return self.segments * self.num_local_experts

    @property
    def num_chunks(self) -> int:
        return max(1, ceil_div(self.tokens_per_rank, self.job_chunk))

    @property
    def num_slots(self) -> int:
        """Length of slot_pair: padded slots."""
        return self.slot_pair.shape[0]

    @property
    def num_blocks(self) -> int:
        return self.block_group.shape[0]

    @property
    def num_jobs(self) -> int:
        """Length of job_order (and of delivery_order: a row that is wanted here is a job here)."""
        return self.job_order.shape[0]

    @property
    def device(self) -> torch.device:
        return self.slots.device

    def tensors(self) -> dict[str, Tensor]:
        """The tables by name, in the order of the fields."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.type == "Tensor"}

    def to(self, device: torch.device | str) -> Tables:
        """The same tables on `device` (self if they are there already)."""
        if torch.device(device) == self.device:
            return self
        return replace(self, **{name: table.to(device) for name, table in self.tensors().items()})
