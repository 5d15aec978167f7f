"""What the ranks of the numerics tests do. Imports no pytest: every rank loads this module."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist
from moe_cases import LayerCase, digest, expected, poison

from moe_tk import reference
from moe_tk.weights import shard_weights


def clean_and_poisoned(rank: int, world: int, case: LayerCase) -> None:
    """Each epoch twice: with all memory zero, and with NaN in all that the call must not read. The bits are the same."""
    layer = case.layer()
    for epoch in range(len(case.counts)):
        inputs = case.inputs(epoch, world, rank)
        bits = []
        for fill in ("zero", "nan"):
            dist.barrier()
            poison(layer)
            if fill == "zero":
                for name in layer.session.workspace._local:
                    layer.session.workspace.local(name).zero_()
                for name in ("arrivals", "planes"):
                    layer.session.workspace.region(name, layer.dtype).zero_()
            dist.barrier()
            bits.append(digest(layer(*inputs)))
        assert bits[0] == bits[1], f"epoch {epoch} reads what it did not write"


def one_bad_token(rank: int, world: int, case: LayerCase, value: float) -> None:
    """One token of rank 0 holds NaN or an infinity: its own row is not finite, all other rows keep their bits."""
    layer = case.layer()
    hidden, ids, weights = case.inputs(0, world, rank)
    clean = layer(hidden, ids, weights)
    if rank == 0:
        hidden = hidden.clone()
        hidden[2] = value
        ids = ids.clone()
    damaged = layer(hidden, ids, weights)
    others = torch.ones(len(hidden), dtype=torch.bool)
    if rank == 0:
        others[2] = False
        assert bool(damaged[2].isnan().any())
    assert digest(damaged[others]) == digest(clean[others])


def bad_weights_at_skipped_ids(rank: int, world: int, case: LayerCase) -> None:
    """NaN and infinities as weights of ids that are skipped do not show."""
    layer = case.layer()
    hidden, ids, weights = case.inputs(0, world, rank)
    skipped = (ids < 0) | (ids >= case.num_experts)
    assert bool(skipped.any())
    clean = layer(hidden, ids, weights.masked_fill(skipped, 0.0))
    for value in (float("nan"), float("inf")):
        assert digest(layer(hidden, ids, weights.masked_fill(skipped, value))) == digest(clean)


def bad_expert(rank: int, world: int, case: LayerCase) -> None:
    """An expert whose weights are NaN: exactly the tokens that chose it are NaN."""
    layer = case.layer()
    w13, w2 = case.weights()
    w13[3] = float("nan")
    layer.load_weights(*shard_weights(w13, w2, mode=layer.mode, world=world, rank=rank))
    hidden, ids, weights = case.inputs(0, world, rank)
    got = layer(hidden, ids, weights)
    chose = (ids == 3).any(1)
    assert bool(chose.any()) and bool((~chose).any())
    assert bool(got[chose].isnan().any(1).all())
    want = layer.reference(hidden, ids, weights, *case.weights())
    assert reference.relative_error(got[~chose], want[~chose]) <= reference.ERROR_BUDGET[case.dtype]


def fill_on(rank: int, world: int, case: LayerCase, calls: int) -> list[str]:
    """Calls while torch fills every new tensor with NaN; digests, all alike."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        layer = case.layer()
        inputs = case.inputs(0, world, rank)
        got = [layer(*inputs) for _ in range(calls)]
        assert reference.relative_error(got[-1], expected(case, layer, inputs)) <= reference.ERROR_BUDGET[case.dtype]
        return [digest(one) for one in got]
    finally:
        torch.use_deterministic_algorithms(False)


def other_plans(rank: int, world: int, case: LayerCase, variants: list[dict]) -> list[str]:
    """Digest of the same call under different plans."""
    results = []
    for options in variants:
        layer = replace(case, options={**case.options, **options}).layer()
        results.append(digest(layer(*case.inputs(0, world, rank))))
        del layer
    return results
