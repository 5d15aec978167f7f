"""The real layer and its real input, as they ship with the package, and the piece of a rank."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from moe_tk.errors import MoETkError

FILE = "moe_layer.safetensors"


@dataclass(frozen=True, eq=False)
class LayerInput:
    """n tokens and the full weights. Everything is as in the file: moe_tk/data/README.md."""

    hidden: Tensor   # [n, H] bfloat16
    ids: Tensor      # [n, k] int32
    weights: Tensor  # [n, k] float32
    shipped: Tensor  # [n, H] float32: the output as computed in float64 when the file was made
    w13: Tensor      # [E, 2I, H] bfloat16, gate rows first
    w2: Tensor       # [E, H, I] bfloat16

    @property
    def sizes(self) -> dict[str, int]:
        """num_experts, top_k, hidden_size, intermediate_size: arguments of the layer by name."""
        return {"num_experts": self.w13.shape[0], "top_k": self.ids.shape[1], "hidden_size": self.hidden.shape[1],
                "intermediate_size": self.w2.shape[2]}

    def rows(self, first: int, count: int) -> LayerInput:
        """The same layer with `count` tokens from `first` on."""
        part = slice(first, first + count)
        return LayerInput(self.hidden[part], self.ids[part], self.weights[part], self.shipped[part], self.w13, self.w2)


def load_input(num_tokens: int) -> LayerInput:
    """The first num_tokens of the tokens that ship. Raises MoETkError when the file is missing."""
    path = Path(str(resources.files("moe_tk"))) / "data" / FILE
    if not path.exists():
        raise MoETkError(f"{path} is missing: it ships with the package, so reinstall moe-tk (a checkout has it too)")
    tensors = load_file(path)
    whole = LayerInput(tensors["x"], tensors["topk_idx"], tensors["topk_weights"], tensors["y_ref"], tensors["w13"], tensors["w2"])
    return whole.rows(0, num_tokens)


def cut(num_tokens: int, world: int, *, uneven: bool) -> list[int]:
    """Tokens of each rank; they get consecutive pieces. Even: counts differ by at most one.

    uneven: the last rank gets none (world >= 2) and rank 1 half a share (world >= 3).
    """
    shares = [2] * world  # in halves
    if uneven and world >= 2:
        shares[-1] = 0
    if uneven and world >= 3:
        shares[1] = 1
    bounds = [num_tokens * sum(shares[:rank]) // sum(shares) for rank in range(world + 1)]
    return [last - first for first, last in zip(bounds, bounds[1:], strict=False)]


def padded_ids(ids: Tensor, counts: list[int]) -> Tensor:
    """[world * T, k]: the ids of all ranks at the row stride T = max(counts) of the tables; -1 in masked rows."""
    stride = max(1, *counts)
    table = torch.full((len(counts), stride, ids.shape[1]), -1, dtype=ids.dtype)
    first = 0
    for rank, count in enumerate(counts):
        table[rank, :count] = ids[first:first + count]
        first += count
    return table.view(-1, ids.shape[1])
