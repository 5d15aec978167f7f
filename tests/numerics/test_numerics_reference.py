"""The oracle itself: against plain loops over tokens, choices and columns, and against the result that ships with the data."""

from __future__ import annotations

import math
from importlib import resources

import pytest
import torch
from backends import each_pattern
from moe_cases import LayerCase, call, load
from safetensors.torch import load_file

from moe_tk import reference

FORMS = {
    "swiglu": {}, "clamped": dict(gate_limit=0.5, up_limit=0.5), "gate only": dict(gate_limit=0.3),
    "gpt_oss": dict(alpha=1.702, beta=1.0, gate_limit=7.0, up_limit=7.0),
    "tight": dict(alpha=1.702, beta=1.0, gate_limit=0.4, up_limit=0.2),
}


def plain_activation(gate: float, up: float, alpha=1.0, beta=0.0, gate_limit=None, up_limit=None) -> float:
    if gate_limit is not None and gate > gate_limit:
        gate = gate_limit
    if up_limit is not None and up > up_limit:
        up = up_limit
    if up_limit is not None and up < -up_limit:
        up = -up_limit
    return gate / (1.0 + math.exp(-alpha * gate)) * (up + beta)


def plain_layer(x, ids, weights, w13, w2, **form) -> list[list[float]]:
    """The definition, with Python numbers: no tensor operation at all."""
    tokens, hidden, inter = len(x), len(w2[0]), len(w2[0][0])
    out = [[0.0] * hidden for _ in range(tokens)]
    for t in range(tokens):
        for expert, weight in zip(ids[t], weights[t], strict=True):
            if not 0 <= expert < len(w13):
                continue
            act = []
            for i in range(inter):
                gate = sum(a * b for a, b in zip(w13[expert][i], x[t], strict=True))
                up = sum(a * b for a, b in zip(w13[expert][inter + i], x[t], strict=True))
                act.append(plain_activation(gate, up, **form))
            for h in range(hidden):
                out[t][h] += weight * sum(a * b for a, b in zip(w2[expert][h], act, strict=True))
    return out


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", ["uniform", "half", "duplicates", "out_of_range"])
def test_reference_is_the_definition(form, kind):
    case = LayerCase(((7,),), (kind,), num_experts=4, top_k=3, hidden=8, inter=5)
    hidden, ids, weights = case.inputs(0, 1, 0)
    w13, w2 = case.weights()
    want = plain_layer(*(tensor.double().tolist() if tensor.is_floating_point() else tensor.tolist()
                         for tensor in (hidden, ids, weights, w13, w2)), **FORMS[form])
    got = reference.moe_layer(hidden, ids, weights, w13, w2, **FORMS[form])
    assert got.dtype == torch.float64
    torch.testing.assert_close(got, torch.tensor(want, dtype=torch.float64), rtol=1e-12, atol=1e-13)


def real_layer() -> dict[str, torch.Tensor]:
    return load_file(str(resources.files("moe_tk").joinpath("data/moe_layer.safetensors")))


def test_reference_is_the_result_that_ships_with_the_data():
    """y_ref of the real layer was computed elsewhere in float64 and rounded to float32 once: 2^-24 and nothing more."""
    data = real_layer()
    rows = torch.arange(0, 4096, 8)
    got = reference.moe_layer(data["x"][rows], data["topk_idx"][rows], data["topk_weights"][rows], data["w13"], data["w2"])
    assert reference.relative_error(data["y_ref"][rows], got) <= 2**-24


@each_pattern("mega", "two_kernel", "serial", world=1)
def test_the_real_layer_gives_the_result_that_ships_with_the_data(backend, pattern, nothing_left):
    """Weights, tokens and routing of a trained model, in bfloat16, without the reference in between."""
    data = real_layer()
    rows = torch.arange(0, 4096, 16)
    layer = LayerCase((), (), 64, 8, 256, 128, 256, torch.bfloat16, options=dict(pattern=pattern)).on(backend).empty_layer()
    load(layer, data["w13"], data["w2"])
    got = call(layer, data["x"][rows], data["topk_idx"][rows], data["topk_weights"][rows])
    assert reference.relative_error(got, data["y_ref"][rows]) <= reference.ERROR_BUDGET[torch.bfloat16]


def test_relative_error_lets_no_nan_pass():
    want = torch.ones(4)
    assert reference.relative_error(torch.ones(4), want) == 0
    assert reference.relative_error(torch.tensor([1.0, 1.0, 1.0, 2.0]), want) == pytest.approx(0.5)
    assert reference.relative_error(torch.zeros(4), torch.zeros(4)) == 0 and reference.relative_error(want, torch.zeros(4)) == 2
    error = reference.relative_error(torch.tensor([1.0, float("nan"), 1.0, 1.0]), want)
    assert not error <= 1e9


@pytest.mark.parametrize("damage", ["nan row", "zero row", "swapped rows", "scaled", "not zero where it must be", "last column"])
def test_the_comparison_of_the_tests_sees_damage(damage):
    """check_result, which all layer tests use, fails on what a broken kernel would leave."""
    from moe_cases import check_result

    case = LayerCase(((60,),), ("half",))
    hidden, ids, weights = case.inputs(0, 1, 0)
    want = reference.moe_layer(hidden, ids, weights, *case.weights())
    got = want.float()
    check_result(got, want, ids, 10, torch.float32)
    full = int((ids >= 0).sum(1).argmax())
    if damage == "nan row":
        got[full] = float("nan")
    elif damage == "zero row":
        got[full] = 0
    elif damage == "swapped rows":
        got[[full, full + 1]] = got[[full + 1, full]]
    elif damage == "scaled":
        got *= 1.0001
    elif damage == "last column":
        got[full, -1] *= 1.001
    else:
        got[int((ids < 0).all(1).int().argmax())] = 1e-20
    with pytest.raises(AssertionError):
        check_result(got, want, ids, 10, torch.float32)
