"""Which part of the weights belongs to a rank, and other checkpoints' layouts turned into ours."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_tk.schedule import expert_range, shard_range


def shard_weights(w13: Tensor, w2: Tensor, *, mode: str, world: int, rank: int) -> tuple[Tensor, Tensor]:
    """The part of full weights w13 [E, 2I, H] (gate rows first) and w2 [E, H, I] that `rank` owns, contiguous.

    EP: its experts, ([E_local, 2I, H], [E_local, H, I]). TP: its columns of I of every expert, ([E, 2I_r, H], [E, H, I_r]);
    I need not be a multiple of world.
    """
    if mode == "ep":
        first, count = expert_range(w13.shape[0], world, rank)
        return w13[first:first + count].contiguous(), w2[first:first + count].contiguous()
    inter = w2.shape[2]
    first, count = shard_range(inter, world, rank)
    gate, up = w13[:, first:first + count], w13[:, inter + first:inter + first + count]
    return torch.cat([gate, up], dim=1).contiguous(), w2[:, :, first:first + count].contiguous()


def from_checkpoint(w13: Tensor, w2: Tensor, *, interleaved: bool, transposed: bool) -> tuple[Tensor, Tensor]:
    """Weights of another layout as (w13 [E, 2I, H] gate rows first, w2 [E, H, I]), contiguous.

    transposed   w13 is [E, H, 2I] and w2 [E, I, H]
    interleaved  gate and up alternate (gate 0, up 0, gate 1, ...), as in gpt-oss checkpoints
    """
    if transposed:
        w13, w2 = w13.transpose(1, 2), w2.transpose(1, 2)
    if interleaved:
        w13 = torch.cat([w13[:, 0::2], w13[:, 1::2]], dim=1)
    return w13.contiguous(), w2.contiguous()
