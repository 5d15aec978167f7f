"""Every pattern against the float64 reference: a covering selection of modes, types, sizes and worlds, six epochs each."""

from __future__ import annotations

import itertools

import pytest
import torch
from backends import hoppers, needs
from layer_ranks import run_epochs
from moe_cases import PATTERNS_OF, ROUTINGS, LayerCase

FACTORS = {
    "mode": ("ep", "tp"),
    "pattern": (("serial", False), ("two_kernel", False), ("two_kernel", True), ("mega", False), ("mega", True)),
    "dtype": (torch.float32, torch.bfloat16),
    "weight_position": ("before_l2", "combine"),
    "activation": (("swiglu", None), ("swiglu", 0.7), ("gpt_oss", None)),
    # experts, top_k, hidden, inter, max_tokens, segments: tails of all kinds, more segments than the ring holds
    "sizes": ((10, 3, 40, 36, 96, None), (3, 2, 72, 80, 40, 1), (16, 8, 128, 64, 64, 4), (5, 1, 8, 9, 130, 3)),
    "world": (2, 3, 4, 8),
}
CUDA_FACTORS = {
    **FACTORS, "pattern": tuple((name, False) for name in PATTERNS_OF["cuda"]), "dtype": (torch.bfloat16,),
    "sizes": (*FACTORS["sizes"], (31, 6, 192, 264, 200, 2), (64, 8, 264, 72, 333, None)), "world": (1, max(2, hoppers())),
    "row_block": (None, 64, 128),
}


def pairwise(factors: dict) -> list[dict]:
    """Few combinations in which every pair of values of two factors occurs: greedy, always the same."""
    names = list(factors)
    open_pairs = {((a, va), (b, vb)) for a, b in itertools.combinations(names, 2) for va in factors[a] for vb in factors[b]}
    chosen = []
    while open_pairs:
        case: dict = dict(min(open_pairs, key=repr))
        for name in names:
            if name in case:
                continue

            def gain(value, name=name, case=case, wanted=frozenset(open_pairs)):
                pairs = [tuple(sorted(((name, value), other), key=lambda item: names.index(item[0]))) for other in case.items()]
                return sum(pair in wanted for pair in pairs)

            case[name] = max(factors[name], key=gain)
        chosen.append(case)
        items = sorted(case.items(), key=lambda item: names.index(item[0]))
        open_pairs -= set(itertools.combinations(items, 2))
    return chosen


def counts_of(world: int, most: int) -> tuple[tuple[int, ...], ...]:
    """Tokens per rank of six epochs: full, uneven, none at all, few after many, one rank without, one rank alone."""
    return ((most,) * world, tuple((most * (rank + 1)) // (2 * world) + rank for rank in range(world)), (0,) * world,
            (3,) * world, tuple(0 if rank == world - 1 else most // 2 + 1 for rank in range(world)),
            tuple(most if rank == world // 2 else 0 for rank in range(world)))


def case_of(factors: dict, number: int) -> LayerCase:
    experts, top_k, hidden, inter, most, segments = factors["sizes"]
    pattern, pull = factors["pattern"]
    activation, limit = factors["activation"]
    routings = tuple(ROUTINGS[(number + epoch) % len(ROUTINGS)] for epoch in range(6))
    options = dict(mode=factors["mode"], pattern=pattern, pull=pull, weight_position=factors["weight_position"],
                   activation=activation, swiglu_limit=limit, segments=segments)
    if "row_block" in factors:
        options["row_block"] = factors["row_block"]
    counts = counts_of(factors["world"], most)
    return LayerCase(counts, routings, experts, top_k, hidden, inter, most, factors["dtype"], number, options)


CASES = {"cpu": pairwise(FACTORS), "cuda": pairwise(CUDA_FACTORS)}


def name_of(backend: str, number: int) -> str:
    c = CASES[backend][number]
    return "-".join([backend, c["mode"], c["pattern"][0], "pull" if c["pattern"][1] else "push", str(c["dtype"])[6:],
                     str(c["world"]), str(number)])


PARAMETERS = [
    *(pytest.param("cpu", number, id=name_of("cpu", number)) for number in range(len(CASES["cpu"]))),
    *(pytest.param("cuda", number, id=name_of("cuda", number), marks=needs(case["world"]))
      for number, case in enumerate(CASES["cuda"])),
]


@pytest.mark.parametrize("backend, factors", [("cpu", FACTORS), ("cuda", CUDA_FACTORS)], ids=["cpu", "cuda"])
def test_the_selection_covers_every_pair(backend, factors):
    seen = {frozenset(pair) for case in CASES[backend] for pair in itertools.combinations(case.items(), 2)}
    wanted = {frozenset(((a, va), (b, vb)))
              for a, b in itertools.combinations(factors, 2) for va in factors[a] for vb in factors[b]}
    assert wanted <= seen and len(CASES[backend]) < 60


@pytest.mark.parametrize("backend, number", PARAMETERS)
def test_layer_equals_the_reference(run_ranks, backend, number):
    """Six epochs on one object with other T and routing each time, poisoned memory, one rank late (OPS-05, KRN-12, SCH-09)."""
    factors = CASES[backend][number]
    run_ranks(factors["world"], run_epochs, case_of(factors, number).on(backend), delay_seed=number, backend=backend)
