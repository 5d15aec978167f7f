"""The unfused layer: gather everybody's tokens, two grouped GEMMs, reduce-scatter the partial sums. A frame for grouped GEMMs.

What it is given, so that the baseline is a strong one:
- The number of rows of this rank is known before the call (it comes from the routing on the host, once), so that all buffers
  are exact, nothing synchronises with the host, and a CUDA graph can hold the call. A framework pays for a synchronisation or
  for padding instead.
- Ids and weights travel as one message, and the routing is sorted while the tokens are still on their way.
- Sorting, activation and combine are small Triton kernels (rivals.triton_kernels) where Triton is installed; torch's own
  operations, many more launches, where it is not.
EP gathers all tokens too: with two ranks and top 8 nearly every token is wanted by both. With many ranks an all-to-all would move
less.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_tk.bench.contender import Call, NotAvailable
from moe_tk.bench.problem import Batch, Problem
from moe_tk.bench.rivals.exchange import Exchange


class GroupedGemm(Protocol):
    """How a rival multiplies. It may have `alignment`: each expert's rows begin at a multiple of it (1 without)."""

    def __init__(self, problem: Problem) -> None:
        """Raises NotAvailable."""

    def tune(self, example: Sorted, x: Tensor) -> None:
        """Whatever is chosen once for this number of rows; x [tokens, H]."""

    def first(self, x: Tensor, routed: Sorted) -> Tensor:
        """[M, 2 I]: row i is x[routed.token[i]] times w13 of its expert, transposed."""

    def second(self, act: Tensor, routed: Sorted) -> Tensor:
        """[M, H]: row i is act[i] times w2 of its expert, transposed."""


@dataclass(frozen=True, eq=False)
class Sorted:
    """The (token, choice) pairs of all ranks that are computed here, sorted by expert."""

    ends: Tensor     # [E_local] int32: the first row behind each expert's
    token: Tensor    # [M] int32: row of the gathered tokens; 0 for rows of padding
    slots: Tensor    # [world * T, k] int32: row of each pair, -1: not here
    weights: Tensor  # [world * T, k] float32
    experts: Tensor | None = None  # [M] int32 local expert of each row, where rows are aligned


class SerialRival:
    """The layer around one grouped GEMM."""

    ours = False

    def __init__(self, name: str, problem: Problem, ranks: Any, gemm: Callable[[Problem], GroupedGemm]) -> None:
        if problem.num_local == 0:
            raise NotAvailable("a rank without experts")
        self.name, self.problem, self.ranks = name, problem, ranks
        self.gemm = gemm(problem)
        self.kernels = triton_kernels(problem.device)

    def prepare(self, batch: Batch) -> Call:
        call = _SerialCall(self, batch)
        routed = call.route(*call.exchange.gather())
        self.gemm.tune(routed, call.exchange.tokens)
        return Call(call.run, call.exchange.out)

    def finish(self) -> None:
        self.ranks.synchronize()


class _SerialCall:
    """Buffers of one batch, and the call."""

    def __init__(self, rival: SerialRival, batch: Batch) -> None:
        self.rival, problem = rival, rival.problem
        self.exchange, self.device = Exchange(problem, rival.ranks, batch), problem.device
        self.first, self.experts, self.top_k = problem.first_expert, problem.num_local, problem.shape.top_k
        here = (batch.all_ids >= self.first) & (batch.all_ids < self.first + self.experts)
        self.pairs = int(here.sum())
        self.alignment = getattr(rival.gemm, "alignment", 1)
        counts = torch.bincount(batch.all_ids[here].long() - self.first, minlength=self.experts)
        self.rows = int((-(-counts // self.alignment) * self.alignment).sum())
        self.numbers = torch.arange(self.experts, dtype=torch.int16, device=self.device)
        self.row_numbers = torch.arange(self.rows, dtype=torch.int32, device=self.device)  # pairs, and padding if aligned

    def run(self) -> None:
        x, routed = self.exchange.tokens, self.route(*self.exchange.gather())
        gemm, kernels = self.rival.gemm, self.rival.kernels
        if self.rows:
            both = gemm.first(x, routed)
            act = kernels.swiglu(both) if kernels else swiglu(both)
            del both
            rows = gemm.second(act, routed)
            partial = kernels.combine(rows, routed) if kernels else combine(rows, routed)
        else:
            partial = torch.zeros_like(x)
        self.exchange.reduce(partial)

    def route(self, routing_work: Any, tokens_work: Any) -> Sorted:
        """Sorts the pairs by local expert, those of other ranks last; waits for both messages."""
        if routing_work is not None:
            routing_work.wait()
        sorted_here = self._sort()
        if tokens_work is not None:
            tokens_work.wait()
        return sorted_here

    def _sort(self) -> Sorted:
        ids, weights = self.exchange.ids, self.exchange.weights
        kernels = self.rival.kernels
        if kernels is not None and self.alignment == 1:
            found = kernels.sort_pairs(self.exchange.routing, top_k=self.top_k, first=self.first, num_experts=self.experts,
                                       rows=self.rows)
            return Sorted(*found, weights)
        local = ids - self.first
        local = torch.where((local >= 0) & (local < self.experts), local, self.experts).to(torch.int16).flatten()
        ordered, order = torch.sort(local, stable=True)
        ends = torch.searchsorted(ordered, self.numbers, right=True, out_int32=True)
        order = order[:self.pairs]
        rows, experts, token = self.row_numbers, None, (order // self.top_k).to(torch.int32)
        if self.alignment > 1:
            rows, token, ends, experts = self._aligned(ends, ordered, token)
        slots = torch.full_like(local, -1, dtype=torch.int32)
        slots[order] = rows
        return Sorted(ends, token, slots.view(-1, self.top_k), weights, experts)

    def _aligned(self, ends: Tensor, ordered: Tensor, token: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(row of each pair, token of each row, ends, expert of each row) with every expert's rows padded."""
        counts = torch.diff(ends, prepend=ends.new_zeros(1))
        padded = (counts + self.alignment - 1) // self.alignment * self.alignment
        new_ends = padded.cumsum(0).to(torch.int32)
        shift = (new_ends - padded) - (ends - counts)
        rows = self.row_numbers[:self.pairs] + shift[ordered[:self.pairs].long()]
        experts = torch.searchsorted(new_ends, self.row_numbers, right=True, out_int32=True)
        return rows, token.new_zeros(self.rows).index_copy_(0, rows.long(), token), new_ends, experts


def triton_kernels(device: torch.device) -> Any:
    """The module of the small kernels; None where they cannot run."""
    if device.type != "cuda":
        return None
    try:
        from moe_tk.bench.rivals import triton_kernels as kernels
    except ImportError:
        return None
    return kernels


def swiglu(both: Tensor) -> Tensor:
    """[M, 2 I], gate columns first -> [M, I]."""
    gate, up = both.chunk(2, dim=1)
    return F.silu(gate) * up


def combine(rows: Tensor, routed: Sorted) -> Tensor:
    """[tokens, H]: sum of the token's rows by their weights."""
    total = torch.zeros(routed.slots.shape[0], rows.shape[1], dtype=torch.float32, device=rows.device)
    for choice in range(routed.slots.shape[1]):
        slot = routed.slots[:, choice].long()
        weight = torch.where(slot >= 0, routed.weights[:, choice], 0.0)
        total += rows[slot.clamp(min=0)].float() * weight[:, None]
    return total.to(rows.dtype)
