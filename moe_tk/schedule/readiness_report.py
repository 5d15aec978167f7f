"""How early the schedule makes things ready: row blocks while rows arrive, jobs while the GEMM runs."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from moe_tk.errors import ArgumentError
from moe_tk.schedule.orders import task_order
from moe_tk.schedule.tables import Tables


@dataclass(frozen=True, slots=True)
class Readiness:
    """Shares in 0..1 at which half and nine tenths are ready; None where there is nothing to get ready.

    blocks_*  axis: arrival progress. All sources send at one rate; 1 is when the longest list has been sent. A row
              block counts as ready when it *and every row block before it in task order* has all its rows, since
              that is the order in which they are consumed.
    jobs_*    axis: GEMM progress, tasks done / all tasks, in task order. A job is ready when the last column of the
              row block with its largest slot is done.

    gather_time and push_time sum a whole curve up: the time that GEMM and communication take together in units of
    either, if they take equally long. 1: one is hidden behind the other; 2: one follows the other.
    """

    segments: int
    num_jobs: int
    num_blocks: int
    num_tasks: int
    padding_share: float                  # padded slots that hold no row / all slots
    blocks_50: float | None               # rows sent in delivery order
    blocks_90: float | None
    blocks_50_token_order: float | None   # rows sent in token order instead
    blocks_90_token_order: float | None
    jobs_50: float | None
    jobs_90: float | None
    gather_time: float | None             # row blocks start as they become ready, rows sent in delivery order
    gather_time_token_order: float | None
    push_time: float | None               # jobs are sent one after the other as they become ready

    def to_dict(self) -> dict[str, float | int | None]:
        return asdict(self)

    def __str__(self) -> str:
        def percent(value: float | None) -> str:
            return "   none" if value is None else f"{100 * value:5.1f} %"

        def line(what: str, half: float | None, most: float | None, axis: str, time: float | None) -> str:
            time_text = "" if time is None else f", GEMM + communication take {time:.2f}"
            return f"  {what:<27}50 % ready at {percent(half)}, 90 % at {percent(most)} of the {axis}{time_text}"

        return "\n".join([
            f"segments={self.segments}: {self.num_jobs} jobs, {self.num_blocks} row blocks, {self.num_tasks} tasks, "
            f"{100 * self.padding_share:.1f} % of the slots are padding",
            line("row blocks, delivery order", self.blocks_50, self.blocks_90, "arrival", self.gather_time),
            line("row blocks, token order", self.blocks_50_token_order, self.blocks_90_token_order, "arrival",
                 self.gather_time_token_order),
            line("jobs", self.jobs_50, self.jobs_90, "GEMM", self.push_time),
        ])


def readiness(tables: Tables, num_col_blocks: int) -> Readiness:
    """The report of one rank's schedule, for a grouped GEMM with num_col_blocks column blocks (the one that feeds the
    jobs). Computed on the CPU. Raises ArgumentError for tables at capacity length."""
    tables = tables.to("cpu")
    if (tables.num_slots, tables.num_jobs) != (int(tables.expert_offsets[-1]), int(tables.expected.sum())):
        raise ArgumentError("readiness wants tables with exact lengths, got capacity length: trim() them first")
    order = task_order(tables, num_col_blocks)
    rows = tables.delivery_order.long()
    in_delivery = _block_arrival(tables, rows)
    in_tokens = _block_arrival(tables, rows.sort().values)
    jobs = _job_ready(tables, order)
    padding = int((tables.slot_pair < 0).sum())
    return Readiness(
        segments=tables.segments, num_jobs=tables.num_jobs, num_blocks=tables.num_blocks, num_tasks=order.shape[0],
        padding_share=padding / max(tables.num_slots, 1),
        blocks_50=_share(in_delivery, 0.5), blocks_90=_share(in_delivery, 0.9),
        blocks_50_token_order=_share(in_tokens, 0.5), blocks_90_token_order=_share(in_tokens, 0.9),
        jobs_50=_share(jobs, 0.5), jobs_90=_share(jobs, 0.9), gather_time=_time(in_delivery),
        gather_time_token_order=_time(in_tokens), push_time=_time(jobs))


def _share(ready_at: Tensor, share: float) -> float | None:
    """Smallest progress at which at least `share` of the entries of ready_at are ready."""
    count = ready_at.numel()
    if count == 0:
        return None
    return float(ready_at.sort().values[-int(-share * count // 1) - 1])


def _time(ready_at: Tensor) -> float | None:
    """When the last of the entries is done, if each takes 1/n, starts when ready, and they are done in this order."""
    count = ready_at.numel()
    if count == 0:
        return None
    return float((ready_at.double() + torch.arange(count, 0, -1) / count).max())


def _block_arrival(tables: Tables, order: Tensor) -> Tensor:
    """[n_blocks] arrival progress at which each row block may start, if every source sends its rows in `order`."""
    source = order // max(tables.tokens_per_rank, 1)
    by_source = source.sort(stable=True)
    start = torch.searchsorted(by_source.values, torch.arange(tables.world))
    place = torch.empty_like(order)
    place[by_source.indices] = torch.arange(order.numel()) - start[by_source.values] + 1
    arrival = torch.zeros(tables.world * tables.tokens_per_rank, dtype=torch.int64)
    arrival[order] = place
    row = tables.slot_pair.long().clamp(min=0) // tables.top_k
    per_slot = torch.where(tables.slot_pair >= 0, arrival[row], 0) if row.numel() else row
    per_block = per_slot.reshape(-1, tables.row_block).amax(1)
    return per_block.cummax(0).values.double() / tables.expected.max().clamp(min=1)


def _job_ready(tables: Tables, order: Tensor) -> Tensor:
    """[n_jobs] GEMM progress at which each job of job_order is complete."""
    done = torch.zeros(tables.num_blocks, dtype=torch.int64)
    done = done.scatter_reduce(0, order[:, 2].long(), torch.arange(order.shape[0]) + 1, "amax")
    last_block = tables.slots[tables.job_order.long()].amax(1).long() // tables.row_block
    return done[last_block].double() / max(order.shape[0], 1)
