"""Layer cases for tests, for both back ends: weights, routings, inputs, and the comparison with the float64 reference. Imports no
pytest. Inputs are drawn and results are compared on the CPU; `call` takes them to the layer's device and back.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe_tk import reference
from moe_tk.cuda_layer import PATTERNS as CUDA_PATTERNS
from moe_tk.layer import MoELayer
from moe_tk.schedule import expert_range
from moe_tk.weights import shard_weights

torch.set_num_threads(1)  # ranks and other tests share the cores

PATTERNS_OF = {"cpu": ("mega", "two_kernel", "serial"), "cuda": tuple(name for name in CUDA_PATTERNS if name != "auto")}
CPU_ONLY = ("pull", "compute_blocks")  # options of a layer that the CUDA back end decides by itself
ROUTINGS = ("uniform", "zipf", "hot_rank", "hot_expert", "last_expert", "none", "half", "duplicates", "out_of_range")


@dataclass(frozen=True)
class LayerCase:
    """A layer and what is fed to it. `counts[e]` are the tokens of every rank in epoch e, `routings[e]` its routing."""

    counts: tuple[tuple[int, ...], ...]
    routings: tuple[str, ...]
    num_experts: int = 10
    top_k: int = 3
    hidden: int = 40
    inter: int = 36
    max_tokens: int = 96
    dtype: torch.dtype = torch.float32
    seed: int = 0
    options: dict[str, Any] = field(default_factory=dict)  # further arguments of MoELayer
    backend: str = "cpu"

    def on(self, backend: str) -> LayerCase:
        """The same case on a back end; that of CUDA has bfloat16 only."""
        return replace(self, backend=backend, dtype=torch.bfloat16 if backend == "cuda" else self.dtype)

    def layer(self, group: Any = None, **options: Any) -> MoELayer:
        """The layer, with this rank's weights loaded."""
        layer = self.empty_layer(group, **options)
        load(layer, *shard_weights(*self.weights(), mode=layer.mode, world=layer.group.world, rank=layer.group.rank))
        return layer

    def empty_layer(self, group: Any = None, **options: Any) -> MoELayer:
        """The layer without weights."""
        options = {**self.options, **options}
        if self.backend == "cuda":
            options = {"protocol": "nvlink", **{name: value for name, value in options.items() if name not in CPU_ONLY}}
        return MoELayer(group, num_experts=self.num_experts, top_k=self.top_k, hidden_size=self.hidden,
                        intermediate_size=self.inter, max_tokens_per_rank=self.max_tokens, dtype=self.dtype, **options)

    def weights(self) -> tuple[Tensor, Tensor]:
        """Full weights w13 [E, 2I, H], w2 [E, H, I]; both layers keep the scale of their input."""
        generator = torch.Generator().manual_seed(self.seed)
        w13 = torch.randn(self.num_experts, 2 * self.inter, self.hidden, generator=generator) * 1.5 / self.hidden**0.5
        w2 = torch.randn(self.num_experts, self.hidden, self.inter, generator=generator) * 1.5 / self.inter**0.5
        return w13.to(self.dtype), w2.to(self.dtype)

    def inputs(self, epoch: int, world: int, rank: int) -> tuple[Tensor, Tensor, Tensor]:
        """(hidden_states, topk_ids, topk_weights) of one rank in one epoch."""
        generator = torch.Generator().manual_seed(1000 * self.seed + 100 * epoch + rank)
        tokens = self.counts[epoch][rank]
        x = torch.randn(tokens, self.hidden, generator=generator).to(self.dtype)
        ids = routing(self.routings[epoch], tokens, self.top_k, self.num_experts, world, generator)
        weights = torch.rand(tokens, self.top_k, generator=generator) * 1.5 - 0.25
        return x, ids.to(torch.int32 if epoch % 2 else torch.int64), weights.to(torch.bfloat16) if epoch % 3 == 2 else weights


def device_of(layer: MoELayer) -> torch.device:
    return getattr(layer, "device", torch.device("cpu"))


def moved(value: Any, device: torch.device) -> Any:
    """A tensor of the CPU on `device`; anything else as it is."""
    return value.to(device) if isinstance(value, Tensor) and value.device.type == "cpu" else value


def load(layer: MoELayer, w13: Any, w2: Any, **flags: bool) -> None:
    """load_weights with tensors of the CPU."""
    layer.load_weights(moved(w13, device_of(layer)), moved(w2, device_of(layer)), **flags)


def call(layer: MoELayer, hidden: Any, ids: Any, weights: Any, *, out: Any = None) -> Tensor:
    """One call with tensors of the CPU. Raises what it failed with; returns its result on the CPU, which is `out` if given."""
    device = device_of(layer)
    if device.type == "cpu":
        return layer(hidden, ids, weights, out=out)
    there = moved(out, device)
    result = layer(*(moved(value, device) for value in (hidden, ids, weights)), out=there)
    layer.synchronize()
    assert out is None or result is there
    return result.cpu() if out is None else out.copy_(result)


def meet(layer: MoELayer) -> None:
    """All ranks come here; none of them is in a call any more."""
    if device_of(layer).type == "cuda":
        torch.cuda.synchronize(layer.device)
        layer.group.gather(None, timeout_s=30.0, step="test: meet")
    elif layer.group.world > 1:
        dist.barrier()


def with_options(case: LayerCase, **options: Any) -> LayerCase:
    return replace(case, options={**case.options, **options})


def routing(kind: str, tokens: int, top_k: int, num_experts: int, world: int, generator: torch.Generator) -> Tensor:
    """[tokens, top_k] int64 expert ids, without replacement unless the kind says otherwise."""
    scores = torch.rand(tokens, num_experts, generator=generator)
    place = torch.arange(num_experts)
    if kind == "zipf":
        scores = scores.pow(1.0 + place)
    elif kind == "hot_rank":
        first, count = expert_range(num_experts, world, world - 1 if num_experts >= world else 0)
        scores[:, first:first + count] += 1.0
    elif kind == "hot_expert":
        scores[:, num_experts // 2] += 1.0
    elif kind == "last_expert":
        return torch.full((tokens, top_k), -1).index_fill(1, torch.tensor([top_k - 1]), num_experts - 1)
    elif kind == "first_expert":
        return torch.full((tokens, top_k), -1).index_fill(1, torch.tensor([0]), 0)
    elif kind == "none":
        return torch.full((tokens, top_k), -1)
    elif kind == "spare_rank_2":  # or the last one of fewer
        first, count = expert_range(num_experts, world, min(2, world - 1))
        scores[:, first:first + count] -= 2.0
    elif kind == "all_on_last_rank":
        scores[:, :-top_k] -= 2.0
    elif kind == "two_and_two":
        return torch.tensor([0, num_experts - 1, 1, num_experts - 2]).expand(tokens, top_k)
    elif kind == "duplicates":
        return torch.randint(0, min(num_experts, 2), (tokens, top_k), generator=generator)
    ids = scores.topk(top_k, dim=1).indices
    if kind.endswith("_rows"):
        ids[::2] = -1 if kind == "half_rows" else num_experts + 1
    elif kind == "half":
        rows = torch.rand(tokens, 1, generator=generator) < 0.25
        ids = ids.masked_fill(rows | (torch.rand(ids.shape, generator=generator) < 1 / 3), -1)
    elif kind == "out_of_range":
        wild = torch.tensor([num_experts, num_experts + 1, 2**30, -2, -(2**31), 2**31 - 1, -1])
        picked = wild[torch.randint(0, len(wild), ids.shape, generator=generator)]
        ids = torch.where(torch.rand(ids.shape, generator=generator) < 0.3, picked, ids)
    return ids


def check_result(got: Tensor, want: Tensor, ids: Tensor, num_experts: int, dtype: torch.dtype) -> None:
    """Asserts that `got` [T, H] is `want` (float64) up to rounding: as a whole, row by row, and exact zero where no id is valid."""
    assert got.dtype == dtype and got.shape == want.shape, (got.dtype, got.shape, want.shape)
    empty = ((ids < 0) | (ids >= num_experts)).all(1)
    assert bool((got[empty] == 0).all()), "a row without a valid expert is not zero"
    budget = reference.ERROR_BUDGET[dtype]
    error = reference.relative_error(got, want)
    assert error <= budget, f"relative error {error:.2e}, budget {budget:.0e}"
    row_error = (got.double() - want).norm(dim=1)
    row_size = want.norm(dim=1)
    typical = row_size.square().mean().sqrt() if len(row_size) else row_size.sum()
    worst = (row_error / (row_size + 0.1 * typical + 1e-30)).max() if len(row_error) else torch.zeros(())
    assert float(worst) <= 6 * budget, f"row {int((row_error / (row_size + 1e-30)).argmax())} is off by {float(worst):.2e}"


def check_each(got: Tensor, case: LayerCase, layer: MoELayer, inputs: tuple[Tensor, Tensor, Tensor]) -> None:
    """Asserts of each element the worst that rounding can do to it, for calls too small for averages to mean anything.

    Four values are rounded on the way (the activation, the expert's output, the partial row, the result), each by at most the
    unit round-off of the absolute values of its terms. Sums over K in float32 err by K times 2^-24 of theirs; an error of gate
    or up reaches the activation times its derivatives, |u + beta| * 1.2 at most and |g|.
    """
    hidden, ids, weights = inputs
    (w13, w2), form, inter = (weight.double() for weight in case.weights()), layer.activation, case.inter
    limits = dict(alpha=form.alpha, beta=form.beta, gate_limit=form.gate_limit, up_limit=form.up_limit)
    rounded, summed = torch.zeros(2, *hidden.shape, dtype=torch.float64)
    for expert in range(case.num_experts):
        token, choice = torch.nonzero(ids == expert, as_tuple=True)
        x, weight = hidden[token].double(), weights[token, choice].double().abs()[:, None]
        gate, up = (x @ w13[expert].T).split(inter, dim=1)
        gate_terms, up_terms = (x.abs() @ w13[expert].abs().T).split(inter, dim=1)
        act = reference.activate(gate, up, **limits).abs()
        act_error = act + (up.abs() + abs(form.beta)) * gate_terms * 1.2 + gate.abs() * up_terms
        rounded.index_add_(0, token, act @ w2[expert].abs().T * weight)
        summed.index_add_(0, token, act_error @ w2[expert].abs().T * weight)
    unit = 2**-8 if case.dtype == torch.bfloat16 else 2**-24
    bound = 4.1 * unit * rounded + (case.hidden + inter + 16) * 2**-24 * summed + 1e-38
    want = expected(case, layer, inputs)
    assert got.dtype == case.dtype and got.shape == want.shape
    over = ((got.double() - want).abs() / bound).max() if got.numel() else torch.zeros(())
    assert float(over) <= 1.0, f"an element is off by {float(over):.2f} times what rounding explains"


def expected(case: LayerCase, layer: MoELayer, inputs: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """What the layer owes for these inputs: [T, H] float64, from the full weights."""
    return layer.reference(*inputs, *case.weights())


def digest(tensor: Tensor) -> str:
    """Hash of the bits."""
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes() + str(tensor.shape).encode()).hexdigest()[:16]


def poison(layer: MoELayer) -> None:
    """Fills what a call must not read: work buffers and partial rows with NaN, old routing with ids that look valid.

    Only while no rank is in a call, between two meet().
    """
    workspace = layer.session.workspace
    workspace.poison()
    if device_of(layer).type == "cuda":
        workspace.region("routing", torch.int32).view(-1, 2)[:, 0].random_(0, layer.num_experts)
        workspace.region("routing", torch.float32).view(-1, 2)[:, 1].fill_(float("nan"))
        return
    for name in ("arrivals", "planes"):
        workspace.region(name, layer.dtype).fill_(float("nan"))
    workspace.region("topk_ids", torch.int32).random_(0, layer.num_experts)
    workspace.region("topk_weights", torch.float32).fill_(float("nan"))


def clear(layer: MoELayer) -> None:
    """Fills what poison() fills with NaN by zeros."""
    workspace = layer.session.workspace
    if device_of(layer).type == "cuda":
        for name in ("slot_rows", "activated"):
            workspace.local(name, layer.dtype).zero_()
        for name in ("rows", "planes"):
            workspace.region(name, layer.dtype).zero_()
        return
    for name in workspace._local:
        workspace.local(name).zero_()
    for name in ("arrivals", "planes"):
        workspace.region(name, layer.dtype).zero_()
