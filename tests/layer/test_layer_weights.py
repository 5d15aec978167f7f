"""Weights: checkpoint layouts, shards, activation forms, where the routing weight is applied, what may alias what."""

from __future__ import annotations

import pytest
import torch
from backends import cuda, on_both
from layer_ranks import call_and_check, digest
from moe_cases import PATTERNS_OF, LayerCase, call, check_result, device_of, expected, load, moved, with_options

from moe_tk import reference
from moe_tk.runtime.launch import Activation
from moe_tk.weights import shard_weights

CASE = LayerCase(((50,),), ("uniform",), max_tokens=64)


@pytest.mark.parametrize("backend, dtype", [("cpu", torch.float32), ("cpu", torch.bfloat16), cuda(torch.bfloat16, world=1)])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
def test_checkpoint_layouts_give_the_same_bits(interleaved, transposed, backend, dtype, nothing_left):
    """Gate and up rows alternating, matrices transposed, both: the layer is the same."""
    case = LayerCase(CASE.counts, CASE.routings, max_tokens=64, dtype=dtype).on(backend)
    w13, w2 = case.weights()
    inputs = case.inputs(0, 1, 0)
    wanted = digest(call_and_check(case.layer(), case, 0))
    given13, given2 = w13, w2
    if interleaved:
        gate, up = w13[:, :case.inter], w13[:, case.inter:]
        given13 = torch.stack([gate, up], dim=2).reshape(w13.shape)
    if transposed:
        given13, given2 = given13.transpose(1, 2).contiguous(), given2.transpose(1, 2).contiguous()
    layer = case.empty_layer()
    load(layer, given13, given2, interleaved=interleaved, transposed=transposed)
    assert digest(call(layer, *inputs)) == wanted


def test_weights_in_our_layout_are_not_copied_and_views_are(nothing_left):
    """Of the CPU back end: kernels on GPUs have a layout of their own, always a copy."""
    w13, w2 = CASE.weights()
    layer = CASE.empty_layer()
    layer.load_weights(w13, w2)
    assert layer._w13.data_ptr() == w13.data_ptr() and layer._w2.data_ptr() == w2.data_ptr()
    wide = torch.cat([w13, torch.full_like(w13, float("nan"))], dim=2)
    layer.load_weights(wide[..., :CASE.hidden], w2.transpose(1, 2).contiguous().transpose(1, 2))
    call_and_check(layer, CASE, 0)


@pytest.mark.parametrize("inter, world", [(36, 4), (37, 4), (9, 8), (8, 8), (640, 3)])
def test_tp_shards_put_together_are_the_weights(inter, world):
    w13, w2 = LayerCase((), (), num_experts=3, inter=inter).weights()
    parts = [shard_weights(w13, w2, mode="tp", world=world, rank=rank) for rank in range(world)]
    widths = [second.shape[2] for _, second in parts]
    assert sum(widths) == inter and max(widths) - min(widths) <= 1
    gate = torch.cat([first[:, :width] for (first, _), width in zip(parts, widths, strict=True)], dim=1)
    up = torch.cat([first[:, width:] for (first, _), width in zip(parts, widths, strict=True)], dim=1)
    assert torch.cat([gate, up], dim=1).equal(w13) and torch.cat([second for _, second in parts], dim=2).equal(w2)


@pytest.mark.parametrize("experts, world", [(10, 4), (3, 8), (30, 8)])
def test_ep_shards_put_together_are_the_weights(experts, world):
    w13, w2 = LayerCase((), (), num_experts=experts).weights()
    parts = [shard_weights(w13, w2, mode="ep", world=world, rank=rank) for rank in range(world)]
    assert torch.cat([first for first, _ in parts]).equal(w13) and torch.cat([second for _, second in parts]).equal(w2)


FORMS = {
    "swiglu": Activation(), "clamped": Activation(gate_limit=0.5, up_limit=0.5), "gpt_oss": Activation(1.702, 1.0, 7.0, 7.0),
    "gate only": Activation(gate_limit=0.25), "up only": Activation(up_limit=0.25), "tight": Activation(1.702, 1.0, 0.3, 0.2),
    "negative alpha": Activation(alpha=-0.5, beta=-1.0),
}


ONE_LIMIT = [name for name, form in FORMS.items() if form.gate_limit == form.up_limit]  # that of the kernels on GPUs


@pytest.mark.parametrize("backend, pattern, form", [
    *(("cpu", pattern, form) for pattern in PATTERNS_OF["cpu"] for form in FORMS),
    *(cuda(pattern, form, world=1) for pattern in PATTERNS_OF["cuda"] for form in ONE_LIMIT)])
@pytest.mark.parametrize("weight_position", ["before_l2", "combine"])
def test_activation_forms_and_weight_positions(backend, pattern, form, weight_position, nothing_left):
    """Limits bite on these inputs; each form differs from plain SwiGLU, and the layer from it too."""
    case = with_options(CASE, pattern=pattern, activation=FORMS[form], weight_position=weight_position).on(backend)
    layer = case.layer()
    inputs = case.inputs(0, 1, 0)
    got, want = call(layer, *inputs), expected(case, layer, inputs)
    check_result(got, want, inputs[1], case.num_experts, case.dtype)
    plain = reference.moe_layer(*inputs, *case.weights())
    assert form == "swiglu" or reference.relative_error(plain, want) > 1e-3


def test_named_activations_are_their_formulas(nothing_left):
    assert CASE.empty_layer().activation == Activation()
    assert CASE.empty_layer(activation="gpt_oss").activation == FORMS["gpt_oss"]
    assert CASE.empty_layer(swiglu_limit=7).activation == Activation(gate_limit=7.0, up_limit=7.0)
    assert CASE.empty_layer(activation=FORMS["gate only"], swiglu_limit=2.0).activation == Activation(gate_limit=2.0, up_limit=2.0)


@pytest.mark.parametrize("backend, dtype, bound", [("cpu", torch.float32, 1e-6), ("cpu", torch.bfloat16, 1e-2),
                                                  cuda(torch.bfloat16, 1e-2, world=1)])
def test_weight_positions_agree_in_float32_and_differ_in_bfloat16(backend, dtype, bound, nothing_left):
    """Equal in exact arithmetic; in bfloat16 the rounding falls elsewhere, and both stay within the budget."""
    case = LayerCase(CASE.counts, CASE.routings, max_tokens=64, dtype=dtype).on(backend)
    first, second = (call_and_check(with_options(case, weight_position=p).layer(), case, 0) for p in ("before_l2", "combine"))
    assert reference.relative_error(first, second.double()) <= bound
    assert dtype == torch.float32 or not first.equal(second)


@on_both
def test_out_may_be_the_input(backend, nothing_left):
    """Each row of the result is written after the row's last reader, so out= may be hidden_states itself."""
    for pattern in PATTERNS_OF[backend]:
        for segments in (1, 4):
            case = with_options(LayerCase(((200,),), ("half",), max_tokens=256), pattern=pattern, segments=segments).on(backend)
            layer = case.layer()
            hidden, ids, weights = (moved(tensor, device_of(layer)) for tensor in case.inputs(0, 1, 0))
            wanted = digest(layer(hidden, ids, weights).cpu())
            given = hidden.clone()
            assert digest(layer(given, ids, weights, out=given).cpu()) == wanted


@on_both
def test_grad_is_refused_unless_it_is_off(backend, nothing_left):
    case = CASE.on(backend)
    layer = case.layer()
    hidden, ids, weights = (moved(tensor, device_of(layer)) for tensor in case.inputs(0, 1, 0))
    needs = hidden.clone().requires_grad_()
    with pytest.raises(ValueError, match=r"hidden_states has requires_grad=True, but .* forward pass only: .* "
                       r"hidden_states.detach\(\)"):
        layer(needs, ids, weights)
    with pytest.raises(ValueError, match="topk_weights has requires_grad=True"):
        layer(hidden, ids, weights.clone().requires_grad_())
    with pytest.raises(ValueError, match="w13 has requires_grad=True"):
        load(layer, case.weights()[0].requires_grad_(), case.weights()[1])
    with torch.no_grad():
        assert not layer(needs, ids, weights).requires_grad
    with torch.inference_mode():
        assert digest(layer(hidden, ids, weights).cpu()) == digest(layer(needs, ids, weights).cpu())


@on_both
def test_modes_of_the_caller_do_not_reach_into_the_layer(backend, nothing_left):
    """Made under inference_mode, a meta default device and a float64 default dtype, called outside of them and the other way."""
    case = CASE.on(backend)
    inputs = case.inputs(0, 1, 0)
    wanted = digest(call(case.layer(), *inputs))
    weights = case.weights()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.inference_mode(), torch.device("meta"):
            layer = case.empty_layer()
            load(layer, *weights)
            assert digest(call(layer, *inputs)) == wanted
    finally:
        torch.set_default_dtype(torch.float32)
    assert digest(call(layer, *inputs)) == wanted and int(layer.expert_load.sum()) == 300
    layer.reset_expert_load()
