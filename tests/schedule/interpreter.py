"""Executes the tables of all ranks as the kernels would, on one number per token: the schedule is enough.

Expert e maps x to (e + 1) * x. Gathered rows and outputs start as NaN, so that a read of what nobody wrote shows.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from moe_tk.schedule import Tables, task_order


@dataclass
class Run:
    """What happened: the result of each token, and who sent what."""

    result: Tensor                                             # [R * T] float64
    rows_sent: dict[tuple[int, int], int] = field(default_factory=dict)   # (source, destination) -> rows moved
    partials: dict[tuple[int, int], float] = field(default_factory=dict)  # (destination, row) -> job sent back


def interpret(tables: list[Tables], weights: Tensor, x: Tensor, num_cols: int = 2) -> Run:
    """tables of ranks 0..R-1 for one routing; weights [R * T, k] and x [R * T] float64."""
    run = Run(torch.zeros_like(x))
    for there in tables:
        _compute_on(there, tables, weights, x, num_cols, run)
    tokens = tables[0].tokens_per_rank
    for source in tables:
        for t in range(tokens):
            row = source.rank * tokens + t
            for there in range(source.world):  # the final sum: planes in rank order
                if int(source.contributors[t]) >> there & 1:
                    run.result[row] += run.partials.pop((there, row))
    assert not run.partials, "a job was sent that its source does not wait for"
    return run


def _compute_on(there: Tables, tables: list[Tables], weights: Tensor, x: Tensor, num_cols: int, run: Run) -> None:
    tokens, top_k = there.tokens_per_rank, there.top_k
    slots, pairs = there.slots.tolist(), there.slot_pair.tolist()
    gathered, output = [float("nan")] * there.num_slots, [float("nan")] * there.num_slots
    arrived, cols_done = [0] * there.num_blocks, [0] * there.num_blocks
    queues = [iter(s.send_order[there.rank, : int(s.send_count[there.rank])].tolist()) for s in tables]
    wire, jobs = iter(there.delivery_order.tolist()), iter(there.job_order.tolist() + [None])
    jobs_sent = torch.zeros_like(there.chunk_expected)
    job = next(jobs)
    for segment, expert, block, _ in task_order(there, num_cols).tolist():
        assert int(there.block_group[block]) == segment * there.num_local_experts + expert
        while arrived[block] < int(there.block_target[block]):  # the gate
            row = next(wire)  # an exhausted wire would be a hang
            source, t = divmod(row, tokens)
            assert next(queues[source]) == t, "the source sends in another order than the gate expects"
            run.rows_sent[source, there.rank] = run.rows_sent.get((source, there.rank), 0) + 1
            for slot in slots[row]:
                if slot >= 0:
                    gathered[slot] = float(x[row])
                    arrived[slot // there.row_block] += 1
        cols_done[block] += 1
        if cols_done[block] < num_cols:
            continue
        for slot in range(block * there.row_block, (block + 1) * there.row_block):
            if pairs[slot] >= 0:
                output[slot] = (there.first_expert + expert + 1) * gathered[slot]
        while job is not None and all(cols_done[s // there.row_block] == num_cols for s in slots[job] if s >= 0):
            partial = sum(float(weights[job, j]) * output[slots[job][j]] for j in range(top_k) if slots[job][j] >= 0)
            run.partials[there.rank, job] = partial
            jobs_sent[job // tokens, job % tokens // there.job_chunk] += 1
            job = next(jobs)
    assert job is None and next(wire, None) is None and all(next(q, None) is None for q in queues)
    assert torch.equal(jobs_sent, there.chunk_expected) and torch.equal(jobs_sent.sum(1).int(), there.expected)


def direct(ids: Tensor, weights: Tensor, x: Tensor, counts: list[int], num_experts: int) -> Tensor:
    """The same layer without any table: [R * T] float64."""
    tokens = ids.shape[0] // len(counts)
    present = (torch.arange(tokens) < torch.tensor(counts)[:, None]).reshape(-1, 1)
    valid = (ids >= 0) & (ids < num_experts) & present
    return (torch.where(valid, weights * (ids.double() + 1), 0.0) * x[:, None]).sum(1)
