"""Calls that cannot be: the same news on all ranks, nothing lost, and the layer usable afterwards."""

from __future__ import annotations

import pytest
from backends import each_pattern, on_both_with_ranks, ranks_on
from layer_ranks import make_layer
from moe_cases import LayerCase, with_options
from refusal_ranks import (
    BAD_INPUTS,
    call_in_other_order,
    differ,
    overflow,
    overlapping_calls,
    refuse_and_go_on,
    refuse_weights_missing,
)

CASE = LayerCase(((9, 4, 7),), ("uniform",))
PAIR = LayerCase(((9, 4),), ("uniform",))
GOOD_SENSE_S = 3.0  # far below any time limit


@each_pattern("mega", "two_kernel", "serial", world=2)
def test_bad_arguments_on_one_rank_are_told_to_all(run_ranks, backend, pattern):
    """ArgumentError where the argument is bad, PeerRefused with that reason on the others, at once; the next call is right. On GPUs
    the reason stays where it is, and values are not looked at."""
    kinds = [kind for kind in BAD_INPUTS if backend == "cpu" or kind != "nan weight"]
    results = run_ranks(ranks_on(backend, 3), refuse_and_go_on, with_options(CASE, pattern=pattern).on(backend), kinds, 1,
                        backend=backend)
    for kind in kinds:
        told = [result[kind] for result in results]
        culprit, others = told[1], [one for rank, one in enumerate(told) if rank != 1]
        assert culprit[0].startswith("Argument") and {error for error, _, _ in others} == {"PeerRefused"}, (kind, told)
        reason = culprit[1].encode("ascii", "replace").decode()[:150]
        said = f"moe_layer: rank 1 refused {'this' if backend == 'cpu' else 'an earlier'} call"
        for _, text, seconds in others:
            assert text.startswith(said) and (reason in text or backend == "cuda") and seconds < GOOD_SENSE_S, kind


@on_both_with_ranks
def test_a_rank_without_weights_refuses_for_all(run_ranks, backend):
    told = run_ranks(2, refuse_weights_missing, PAIR.on(backend), backend=backend)
    assert told[0][0] == "ArgumentError" and "call load_weights(w13, w2) first" in told[0][1]
    assert told[1][0] == "PeerRefused" and ("load_weights" in told[1][1] or backend == "cuda")


@pytest.mark.parametrize("counts", [(3, 97, 0), (97, 97, 97), (500, 3, 98)])
@each_pattern("mega", "two_kernel", "serial", world=2)
def test_sym_07_too_many_tokens_are_the_same_capacity_error_everywhere(run_ranks, counts, backend, pattern):
    """More tokens than the buffers hold, on one rank or on all: refused before anything moves, with T, limit and argument. On GPUs
    a rank knows of itself, or of the first one."""
    world = ranks_on(backend, 3)
    told = run_ranks(world, overflow, with_options(CASE, pattern=pattern).on(backend), counts, backend=backend)
    assert {error for error, _, _ in told} == {"CapacityError"}, told
    for rank, (_, text, _) in enumerate(told):
        assert "max_tokens_per_rank=96" in text
        if backend == "cpu":
            assert text == told[0][1] and f"max_tokens_per_rank >= {max(counts)}" in text
            assert all((f"rank {rank}: {count}" in text) == (count > 96) for rank, count in enumerate(counts))
        else:
            first = rank if counts[rank] > 96 else next(rank for rank in range(world) if counts[rank] > 96)
            assert f"rank {first} had {counts[first]} tokens" in text and f"max_tokens_per_rank >= {counts[first]}" in text


@on_both_with_ranks
def test_sym_07_one_token_too_many(run_ranks, backend):
    case = LayerCase(((64, 64),), ("uniform",), max_tokens=64).on(backend)
    for counts in ((65, 64), (65, 65)):
        assert {error for error, _, _ in run_ranks(2, overflow, case, counts, backend=backend)} == {"CapacityError"}


DIFFERENT = {
    "hidden_size": ({}, {"hidden_size": 48}), "num_experts": ({}, {"num_experts": 12}), "top_k": ({}, {"top_k": 2}),
    "mode": ({}, {"mode": "tp"}), "max_tokens_per_rank": ({}, {"max_tokens_per_rank": 97}), "segments": ({}, {"segments": 2}),
    "pattern": ({"pattern": "two_kernel"}, {"pattern": "serial"}), "pull": ({}, {"pull": True}),
    "activation": ({}, {"activation": "gpt_oss"}), "swiglu_limit": ({"swiglu_limit": 1.0}, {"swiglu_limit": 2.0}),
    "weight_position": ({}, {"weight_position": "combine"}), "intermediate_size": ({}, {"intermediate_size": 44}),
}


@pytest.mark.parametrize("name", DIFFERENT)
@on_both_with_ranks
def test_layers_that_differ_between_ranks_are_refused_on_all(run_ranks, backend, name):
    """Whatever must be equal on all ranks is compared, when the layer is made or when it is called."""
    if backend == "cuda" and name in ("pattern", "pull"):
        pytest.skip("the CUDA back end has one direction, and patterns of its own")
    for error, text, seconds in run_ranks(2, differ_by_one_argument, PAIR.on(backend), DIFFERENT[name], backend=backend):
        assert error == "MoETkError" and "rank 0" in text and "rank 1" in text and seconds < GOOD_SENSE_S, (error, text)
        assert "all ranks must make the same" in text.lower()


def differ_by_one_argument(rank: int, world: int, case: LayerCase, options) -> tuple[str, str, float]:
    from dataclasses import replace

    names = {"hidden_size": "hidden", "intermediate_size": "inter", "max_tokens_per_rank": "max_tokens"}
    own = dict(options[rank])
    for name in [n for n in own if n in (*names, "num_experts", "top_k")]:
        case = replace(case, **{names.get(name, name): own.pop(name)})
    return differ(rank, world, case, [own] * world)


@on_both_with_ranks
def test_layers_called_in_another_order_on_one_rank(run_ranks, backend):
    """Two layers of one workspace: nothing is mixed up, all ranks are told, and the right order works afterwards."""
    case = CASE.on(backend)
    for error, text, seconds in run_ranks(ranks_on(backend, 3), call_in_other_order, case, case, backend=backend):
        assert error == "MoETkError" and "same order" in text and seconds < GOOD_SENSE_S
        assert "layer 2" in text and "layer 1" in text or backend == "cuda"  # there a call is known by its signature


@on_both_with_ranks
def test_layers_of_two_workspaces_called_in_another_order(run_ranks, backend):
    """Nobody can compare what happens on two workspaces: the bounded wait ends it on all ranks."""
    other = LayerCase(((9, 4),), ("uniform",), max_tokens=64).on(backend)
    for error, text, seconds in run_ranks(2, call_in_other_order, PAIR.on(backend), other, backend=backend):
        assert error == "ProtocolTimeout" and "same call" in text and seconds < 1.5


def test_sym_11_one_call_in_flight(run_ranks):
    """A second call while the first waits for a late rank is refused at once, on the layer and on another of its workspace."""
    told = run_ranks(2, overlapping_calls, PAIR)
    assert [error for error, _, _ in told[0]] == ["MoETkError", "MoETkError"]
    for _, text, seconds in told[0]:
        assert "in flight" in text and "one at a time" in text and seconds < 0.45  # the late rank comes after 0.5 s


BAD_LAYERS = {
    "top_k is 11": {"top_k": 11}, "hidden_size is 41": {"hidden": 41}, "mode is 'ep+tp'": {"mode": "ep+tp"},
    "dtype is torch.float16": {"dtype_name": "float16"}, "timeout_s is -1": {"timeout_s": -1.0},
    "pattern is 'best'": {"pattern": "best"},
}


@pytest.mark.parametrize("text", BAD_LAYERS)
def test_a_layer_that_one_rank_cannot_make_is_refused_on_all(run_ranks, text):
    """The rank with the bad argument raises it; the others hear of it instead of waiting for a rank that will not come."""
    told = run_ranks(3, make_layer_badly_on_rank_1, CASE, BAD_LAYERS[text])
    assert told[1][0].startswith("Argument") and told[1][1].startswith(text)
    for error, reason, seconds in (told[0], told[2]):
        assert error == "PeerRefused" and f"MoELayer: failed on rank 1: {text}" in reason and seconds < GOOD_SENSE_S


def make_layer_badly_on_rank_1(rank: int, world: int, case: LayerCase, bad: dict) -> tuple[str, str, float]:
    from dataclasses import replace

    import torch

    if rank != 1:
        return make_layer(rank, world, case)
    bad = dict(bad)
    if "dtype_name" in bad:
        bad = {"dtype": getattr(torch, bad.pop("dtype_name"))}
    sizes = {name: bad.pop(name) for name in list(bad) if name in ("top_k", "hidden", "dtype")}
    return make_layer(rank, world, replace(case, **sizes), **bad)


@pytest.mark.parametrize("wanted", ["pcie", "staged"])  # nvlink: tests/nvlink
def test_a_protocol_for_gpus_is_refused(wanted, nothing_left):
    from moe_tk.errors import TopologyError

    with pytest.raises(TopologyError, match="protocol '.*' moves data between GPUs, .* use protocol='shm' or 'auto'"):
        LayerCase(((1,),), ("uniform",)).layer(protocol=wanted)


def test_num_10_a_mix_of_ep_and_tp_is_refused(nothing_left):
    for mode in ("ep+tp", "hybrid", None, 2):
        with pytest.raises(ValueError, match="mode is .*, wanted one of ep, tp .a mix of both is not supported"):
            LayerCase(((1,),), ("uniform",)).layer(mode=mode)
