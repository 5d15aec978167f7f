"""Routings for tests, demo and benchmarks: synthetic ones by name, and the real ones that ship with the package.

Synthetic routers draw their top k without replacement (Gumbel noise on the logarithm of each expert's popularity);
weights are the softmax over all experts at the chosen ones, not renormalised, so that a row sums to less than 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from moe_tk.errors import ArgumentError
from moe_tk.schedule.ownership import expert_range

ROUTINGS = ("uniform", "zipf", "hot_expert", "hot_rank", "balanced", "all_invalid", "half_invalid")
TRACE_FILE = "routing.safetensors"            # 4 layers, 64 experts, top 8, 16384 tokens
FLAME_FILE = "flame_moe_290m_top6of64.npz"    # FLAME-MoE-290M: 8 layers, 64 experts, top 6, 2048 tokens
_HOT = 20.0                                   # log-popularity that practically always wins


@dataclass(frozen=True, slots=True, eq=False)
class Routing:
    """A router's output for n tokens."""

    topk_ids: Tensor      # [n, k] int32; -1: skip
    topk_weights: Tensor  # [n, k] float32


def make_routing(name: str, num_tokens: int, num_experts: int, top_k: int, *, world: int = 1, seed: int = 0,
                 zipf_s: float = 1.2, hot: int = 0) -> Routing:
    """The routing `name` (one of ROUTINGS) of num_tokens tokens.

    zipf_s: popularity of the i-th most popular expert is 1 / i**zipf_s (which one that is depends on the seed).
    hot: the hot expert of "hot_expert" (every token chooses it), or the hot rank of `world` ranks of "hot_rank" (every
    token fills its k with that rank's experts before it takes others). "balanced": pair p goes to expert p mod E.
    "half_invalid": a quarter of the rows are all -1 and a third of the other ids are, half of all on average.
    """
    if name not in ROUTINGS:
        raise ArgumentError(f"routing must be one of {', '.join(ROUTINGS)}, got {name!r}")
    if not 1 <= top_k <= num_experts:
        raise ArgumentError(f"top_k must be in 1..num_experts={num_experts} (drawn without replacement), got {top_k}")
    generator = torch.Generator().manual_seed(seed)
    popularity = torch.zeros(num_experts)
    if name == "zipf":
        place = torch.randperm(num_experts, generator=generator) + 1
        popularity = -zipf_s * place.log()
    elif name == "hot_expert":
        popularity[hot] = _HOT
    elif name == "hot_rank":
        first, count = expert_range(num_experts, world, hot)
        popularity[first : first + count] = _HOT
    scores = popularity + _gumbel((num_tokens, num_experts), generator)
    if name == "balanced":
        ids = torch.arange(num_tokens * top_k).reshape(num_tokens, top_k) % num_experts
    else:
        ids = scores.topk(top_k, dim=1).indices
    weights = scores.softmax(1).gather(1, ids)
    if name == "all_invalid":
        ids = torch.full_like(ids, -1)
    elif name == "half_invalid":
        rows = torch.rand((num_tokens, 1), generator=generator) < 1 / 4
        ids = ids.masked_fill(rows | (torch.rand(ids.shape, generator=generator) < 1 / 3), -1)
    return Routing(ids.to(torch.int32), weights)


def _gumbel(shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    uniform = torch.rand(shape, generator=generator).clamp(1e-20, 1 - 2**-24)
    return -(-uniform.log()).log()


def trace_routing(layer: int = 2) -> Routing:
    """Routing of MoE layer 0..3 of a small trained model over 16384 held-out tokens: 64 experts, top 8.

    Tokens 2048 * i ... 2048 * i + 2047 are of text kind i (fiction, dictionary, docs, python, go, asm, html, i18n).
    """
    from safetensors.torch import load_file

    tensors = load_file(_data_file(TRACE_FILE))
    _check_layer(layer, 4)
    return Routing(tensors[f"layer{layer}.topk_idx"].to(torch.int32), tensors[f"layer{layer}.topk_weights"].float())


def flame_routing(layer: int = 0) -> Routing:
    """Prefill routing of MoE layer 0..7 of FLAME-MoE-290M over 2048 tokens: 64 experts, top 6 (weights sum below 1)."""
    arrays = np.load(_data_file(FLAME_FILE))
    _check_layer(layer, 8)
    return Routing(torch.from_numpy(arrays["prefill_idx"][layer].astype(np.int32)),
                   torch.from_numpy(arrays["prefill_w"][layer].astype(np.float32)))


def _check_layer(layer: int, layers: int) -> None:
    if not 0 <= layer < layers:
        raise ArgumentError(f"layer must be in 0..{layers - 1}, got {layer}")


def _data_file(name: str) -> Path:
    path = Path(str(resources.files("moe_tk"))) / "data" / name
    if not path.is_file():
        raise ArgumentError(f"{path} is missing: it ships with the package; reinstall it")
    return path
