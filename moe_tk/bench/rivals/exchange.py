"""Both ends of the layer in steps: all-gather of tokens and routing before, reduce-scatter of the partial sums after."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe_tk.bench.problem import Batch, Problem

# torch 2.13 renamed these two and warns about the old names
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


class Exchange:
    """Buffers of one batch, and the messages. Ids and weights travel as one."""

    def __init__(self, problem: Problem, ranks: Any, batch: Batch) -> None:
        self.batch, self.world, self.group = batch, problem.world, ranks.process_group
        everyone, self.top_k = problem.world * batch.tokens, problem.shape.top_k
        self.tokens = torch.empty(everyone, problem.shape.hidden, dtype=batch.hidden.dtype, device=problem.device)
        self.routing = torch.empty(everyone, 2 * self.top_k, dtype=torch.int32, device=problem.device)
        self.out = torch.full_like(batch.hidden, float("nan"))

    @property
    def ids(self) -> Tensor:
        """[world * T, k] int32 of everybody, not contiguous."""
        return self.routing[:, :self.top_k]

    @property
    def weights(self) -> Tensor:
        """[world * T, k] float32 of everybody, not contiguous."""
        return self.routing[:, self.top_k:].view(torch.float32)

    def gather(self) -> tuple[Any, Any]:
        """Both messages on their way: what waits for `routing`, and what waits for `tokens`; None: it is there."""
        batch = self.batch
        packed = torch.cat([batch.ids.to(torch.int32), batch.weights.view(torch.int32)], 1)
        if self.world == 1:
            self.routing.copy_(packed)
            self.tokens.copy_(batch.hidden)
            return None, None
        return (_all_gather(self.routing, packed, group=self.group, async_op=True),
                _all_gather(self.tokens, batch.hidden, group=self.group, async_op=True))

    def reduce(self, partial: Tensor) -> None:
        """out [T, H] = sum over ranks of their partial [world * T, H], this rank's rows."""
        if self.world == 1:
            self.out.copy_(partial)
        else:
            _reduce_scatter(self.out, partial, group=self.group)
