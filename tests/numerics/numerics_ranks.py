"""What the ranks of the numerics tests do. Imports no pytest: every rank loads this module."""

from __future__ import annotations

from dataclasses import replace

import torch
from moe_cases import LayerCase, call, clear, digest, expected, load, meet, poison

from moe_tk import reference
from moe_tk.weights import shard_weights


def clean_and_poisoned(rank: int, world: int, case: LayerCase) -> None:
    """Each epoch twice: with all memory zero, and with NaN in all that the call must not read. The bits are the same."""
    layer = case.layer()
    for epoch in range(len(case.counts)):
        inputs = case.inputs(epoch, world, rank)
        bits = []
        for fill in ("zero", "nan"):
            meet(layer)
            poison(layer)
            if fill == "zero":
                clear(layer)
            meet(layer)
            bits.append(digest(call(layer, *inputs)))
        assert bits[0] == bits[1], f"epoch {epoch} reads what it did not write"


def one_bad_token(rank: int, world: int, case: LayerCase, value: float) -> None:
    """One token of rank 0 holds NaN or an infinity: its own row is not finite, all other rows keep their bits."""
    layer = case.layer()
    hidden, ids, weights = case.inputs(0, world, rank)
    clean = call(layer, hidden, ids, weights)
    if rank == 0:
        hidden = hidden.clone()
        hidden[2] = value
        ids = ids.clone()
    damaged = call(layer, hidden, ids, weights)
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
    clean = call(layer, hidden, ids, weights.masked_fill(skipped, 0.0))
    for value in (float("nan"), float("inf")):
        assert digest(call(layer, hidden, ids, weights.masked_fill(skipped, value))) == digest(clean)


def bad_expert(rank: int, world: int, case: LayerCase) -> None:
    """An expert whose weights are NaN: exactly the tokens that chose it are NaN."""
    layer = case.layer()
    w13, w2 = case.weights()
    w13[3] = float("nan")
    load(layer, *shard_weights(w13, w2, mode=layer.mode, world=world, rank=rank))
    hidden, ids, weights = case.inputs(0, world, rank)
    got = call(layer, hidden, ids, weights)
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
        got = [call(layer, *inputs) for _ in range(calls)]
        assert reference.relative_error(got[-1], expected(case, layer, inputs)) <= reference.ERROR_BUDGET[case.dtype]
        return [digest(one) for one in got]
    finally:
        torch.use_deterministic_algorithms(False)


def other_plans(rank: int, world: int, case: LayerCase, variants: list[dict]) -> list[str]:
    """Digest of the same call under different plans."""
    results = []
    for options in variants:
        layer = replace(case, options={**case.options, **options}).layer()
        results.append(digest(call(layer, *case.inputs(0, world, rank))))
        del layer
    return results


def bad_weight(rank: int, world: int, case: LayerCase) -> None:
    """What a router makes of NaN logits: one token of rank 0 with NaN weights, one with the first expert in all places. Only these
    rows differ, and the first one shows it."""
    layer = case.layer()
    hidden, ids, weights = case.inputs(0, world, rank)
    clean = call(layer, hidden, ids, weights)
    others = torch.ones(len(hidden), dtype=torch.bool)
    if rank == 0:
        ids, weights = ids.clone(), weights.clone()
        weights[2], ids[5], others[2], others[5] = float("nan"), 0, False, False
    damaged = call(layer, hidden, ids, weights)
    assert digest(damaged[others]) == digest(clean[others])
    if rank == 0:
        want = layer.reference(hidden, ids, weights, *case.weights())
        assert bool(damaged[2].isnan().all())
        assert reference.relative_error(damaged[5], want[5]) <= 3 * reference.ERROR_BUDGET[case.dtype]


def with_shared_expert(rank: int, world: int, case: LayerCase) -> None:
    """A shared expert beside the layer, ten times as large: added once on the source rank, in either mode, it counts once."""
    layer = case.layer()
    inputs = case.inputs(0, world, rank)
    generator = torch.Generator().manual_seed(99)
    shared = 10 * torch.randn(case.hidden, case.hidden, generator=generator).to(case.dtype) / case.hidden**0.5
    beside = inputs[0].double() @ shared.double().T
    got = call(layer, *inputs).double() + beside
    assert reference.relative_error(got, expected(case, layer, inputs) + beside) <= reference.ERROR_BUDGET[case.dtype]
