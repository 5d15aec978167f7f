"""The routing generators do what their names say."""

from __future__ import annotations

import pytest
import torch

from moe_tk.errors import ArgumentError
from moe_tk.schedule import flame_routing, make_routing, trace_routing
from moe_tk.schedule.routings import ROUTINGS


@pytest.mark.parametrize("name", ROUTINGS)
def test_shapes_distinct_ids_weights_and_seeds(name):
    routing = make_routing(name, 200, 24, 6, world=4, seed=5)
    assert routing.topk_ids.shape == routing.topk_weights.shape == (200, 6)
    assert routing.topk_ids.dtype == torch.int32 and routing.topk_weights.dtype == torch.float32
    for row in routing.topk_ids.tolist():
        real = [e for e in row if e != -1]
        assert len(set(real)) == len(real) and all(0 <= e < 24 for e in real)
    sums = routing.topk_weights.sum(1)
    assert bool((routing.topk_weights > 0).all()) and bool((sums <= 1 + 1e-6).all())
    again = make_routing(name, 200, 24, 6, world=4, seed=5)
    assert torch.equal(again.topk_ids, routing.topk_ids) and torch.equal(again.topk_weights, routing.topk_weights)
    if name not in ("balanced", "all_invalid"):
        assert not torch.equal(make_routing(name, 200, 24, 6, world=4, seed=6).topk_ids, routing.topk_ids)


def load(name: str, **arguments) -> torch.Tensor:
    ids = make_routing(name, 4000, 32, 4, world=4, **arguments).topk_ids
    return ids[ids >= 0].long().bincount(minlength=32)


def test_loads_have_the_promised_shape():
    assert load("balanced").tolist() == [500] * 32
    assert 400 < int(load("uniform").min()) and int(load("uniform").max()) < 600
    assert int(load("hot_expert", hot=7)[7]) == 4000
    assert int(load("hot_rank", hot=2)[16:24].sum()) == 16000
    skew, flat = load("zipf").sort().values, load("zipf", zipf_s=0.0).sort().values
    assert int(skew[-1]) > 8 * int(skew[0]) and int(flat[-1]) < 2 * int(flat[0])
    assert int(load("all_invalid").sum()) == 0
    half = make_routing("half_invalid", 4000, 32, 4).topk_ids
    assert 0.47 < float((half == -1).double().mean()) < 0.53
    assert bool((half == -1).all(1).any()) and bool((half >= 0).all(1).any())


def test_a_hot_rank_with_fewer_experts_than_k_is_filled_up():
    ids = make_routing("hot_rank", 50, 8, 4, world=4, hot=1).topk_ids
    assert all({2, 3} < set(row) for row in ids.tolist())


def test_no_tokens():
    for name in ROUTINGS:
        assert make_routing(name, 0, 8, 2).topk_ids.shape == (0, 2)


def test_refusals():
    with pytest.raises(ArgumentError, match="routing must be one of uniform, .* got 'random'"):
        make_routing("random", 1, 8, 2)
    with pytest.raises(ArgumentError, match=r"top_k must be in 1..num_experts=8 .* got 9"):
        make_routing("uniform", 1, 8, 9)
    with pytest.raises(ArgumentError, match="layer must be in 0..3, got 4"):
        trace_routing(4)


def test_real_routings():
    for layer in range(4):
        routing = trace_routing(layer)
        assert routing.topk_ids.shape == (16384, 8)
        assert int(routing.topk_ids.min()) == 0 and int(routing.topk_ids.max()) == 63
        torch.testing.assert_close(routing.topk_weights.sum(1), torch.ones(16384), rtol=0, atol=2e-3)
    for layer in range(8):
        routing = flame_routing(layer)
        assert routing.topk_ids.shape == (2048, 6) and 0 <= int(routing.topk_ids.min())
        assert int(routing.topk_ids.max()) < 64
        assert float(routing.topk_weights.sum(1).max()) < 1  # gate weights need not sum to 1
