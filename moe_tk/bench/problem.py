"""The data of a layer: weights by expert, tokens and routing by rank, and the reference of a few tokens.

Every expert's weights come from a generator of their own, so that a rank makes its share, and the reference the experts that
it needs, without the whole: all of deepseek-v4-pro would be 51 GB.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_tk import reference
from moe_tk.bench import routings
from moe_tk.bench.shapes import Shape
from moe_tk.schedule.ownership import local_experts, shard_range

CHECKED_TOKENS = 16  # of each rank


@dataclass(frozen=True, eq=False)
class Batch:
    """One rank's input, and the ids of all ranks."""

    hidden: Tensor    # [T, H] bfloat16
    ids: Tensor       # [T, k] int32
    weights: Tensor   # [T, k] float32
    all_ids: Tensor   # [world * T, k] int32, on the CPU

    @property
    def tokens(self) -> int:
        return self.hidden.shape[0]


class Problem:
    """One layer on one rank, bfloat16."""

    def __init__(self, shape: Shape, mode: str, *, world: int, rank: int, device: torch.device, seed: int = 0) -> None:
        self.shape, self.mode, self.world, self.rank, self.device, self.seed = shape, mode, world, rank, device, seed
        self.first_expert, self.num_local = local_experts(shape.experts, world, rank, mode)
        self.first_column, self.inter = (0, shape.intermediate)
        if mode == "tp":
            self.first_column, self.inter = shard_range(shape.intermediate, world, rank)
        self._local: tuple[Tensor, Tensor] | None = None

    def expert(self, index: int) -> tuple[Tensor, Tensor]:
        """w13 [2I, H], gate rows first, and w2 [H, I] of one expert: the whole expert, equal on all ranks."""
        draw = torch.Generator(device=self.device).manual_seed(self.seed * 1_000_003 + index)
        hidden, inter = self.shape.hidden, self.shape.intermediate

        def normal(rows: int, columns: int) -> Tensor:
            return torch.empty(rows, columns, device=self.device, dtype=torch.bfloat16).normal_(std=columns**-0.5, generator=draw)

        return normal(2 * inter, hidden), normal(hidden, inter)

    def local_weights(self) -> tuple[Tensor, Tensor]:
        """w13 [E_local, 2 I_local, H] and w2 [E_local, H, I_local] of this rank; made once."""
        if self._local is None:
            self._local = self._make_local()
        return self._local

    def _make_local(self) -> tuple[Tensor, Tensor]:
        full, first, inter, hidden = self.shape.intermediate, self.first_column, self.inter, self.shape.hidden
        w13 = torch.empty(self.num_local, 2 * inter, hidden, dtype=torch.bfloat16, device=self.device)
        w2 = torch.empty(self.num_local, hidden, inter, dtype=torch.bfloat16, device=self.device)
        for index in range(self.num_local):
            both, second = self.expert(self.first_expert + index)
            w13[index, :inter] = both[first:first + inter]
            w13[index, inter:] = both[full + first:full + first + inter]
            w2[index] = second[:, first:first + inter]
        return w13, w2

    def batch(self, routing: str, tokens: int) -> Batch:
        """This rank's `tokens` tokens. Raises ArgumentError when the routing does not fit the shape."""
        found = routings.make(routing, self.shape, tokens=tokens, world=self.world, seed=self.seed)
        mine = slice(self.rank * tokens, (self.rank + 1) * tokens)
        draw = torch.Generator(device=self.device).manual_seed(self.seed + 17 + self.rank)
        hidden = torch.randn(tokens, self.shape.hidden, device=self.device, generator=draw).bfloat16()
        return Batch(hidden, found.topk_ids[mine].to(self.device), found.topk_weights[mine].to(self.device), found.topk_ids)

    def sample(self, batch: Batch) -> Sample:
        """CHECKED_TOKENS tokens spread over the batch with their results in float64."""
        count = min(CHECKED_TOKENS, batch.tokens)
        rows = torch.arange(count, device=self.device) * max(batch.tokens, 1) // max(count, 1)
        hidden, ids, weights = batch.hidden[rows], batch.ids[rows], batch.weights[rows]
        want = torch.zeros(count, self.shape.hidden, dtype=torch.float64, device=self.device)
        for index in torch.unique(ids).tolist():
            if 0 <= index < self.shape.experts:
                w13, w2 = self.expert(index)
                alone = torch.where(ids == index, 0, -1)
                want += reference.moe_layer(hidden, alone, weights, w13[None], w2[None])
        return Sample(rows, want)


@dataclass(frozen=True, eq=False)
class Sample:
    """Some rows of the result as they should be."""

    rows: Tensor   # [n]
    want: Tensor   # [n, H] float64

    def squares(self, result: Tensor) -> tuple[float, float]:
        """(squared norm of the difference, squared norm of what should be); NaN in the result gives NaN."""
        got = result[self.rows].double()
        return float((got - self.want).square().sum()), float(self.want.square().sum())
