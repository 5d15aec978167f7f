"""moe_tk.MoELayer as a contender, one for each pattern; all of one shape and mode share workspace and weights."""

from __future__ import annotations

import torch

import moe_tk
from moe_tk.bench.contender import Call, NotAvailable
from moe_tk.bench.problem import Batch, Problem
from moe_tk.errors import ArgumentError, TopologyError

PROTOCOLS = {"cuda": "nvlink", "cpu": "shm"}
DTYPES = {"bf16": torch.bfloat16, "e4m3": torch.float8_e4m3fn}


class Ours:
    """The layer with one pattern."""

    ours = True

    def __init__(self, pattern: str, problem: Problem, group: object, *, max_tokens: int, dtype: str, timeout_s: float,
                 like: Ours | None = None) -> None:
        """A collective. like: another pattern of the same problem, whose copy of the weights serves here too.

        Raises NotAvailable for what the layer refuses.
        """
        shape = problem.shape
        self.name, self.group = pattern, group
        try:
            self.layer = moe_tk.MoELayer(
                group, num_experts=shape.experts, top_k=shape.top_k, hidden_size=shape.hidden, timeout_s=timeout_s,
                intermediate_size=shape.intermediate, max_tokens_per_rank=max(1, max_tokens), mode=problem.mode, pattern=pattern,
                protocol=PROTOCOLS[problem.device.type], dtype=DTYPES[dtype])
        except (ArgumentError, TopologyError) as error:
            raise NotAvailable(str(error)) from None
        if like is None or not self._share_weights(like):
            self.layer.load_weights(*problem.local_weights())  # an e4m3 layer quantises them

    def _share_weights(self, other: Ours) -> bool:
        mine, theirs = (getattr(contender.layer, "_calls", None) for contender in (self, other))
        if mine is None or theirs is None or type(mine) is not type(theirs):
            return False
        for name, value in vars(theirs).items():
            if name.startswith(("w13", "w2")):  # weights, and their scales
                setattr(mine, name, value)
        return True

    def prepare(self, batch: Batch) -> Call:
        out = torch.full_like(batch.hidden, float("nan"))
        return Call(lambda: self.layer(batch.hidden, batch.ids, batch.weights, out=out), out)

    def finish(self) -> None:
        self.layer.synchronize()
