"""Every check of an argument: the message names the argument, its value and the valid values, and what is nearest (OPS-04)."""

from __future__ import annotations

import re

import pytest
import torch
from backends import needs, on_both
from layer_ranks import digest
from moe_cases import LayerCase, call, device_of, load, moved

import moe_tk
from moe_tk.errors import ArgumentError, ArgumentTypeError, CapacityError, MoETkError
from moe_tk.layer import MoELayer
from moe_tk.runtime.launch import Activation

SIZES = dict(num_experts=8, top_k=2, hidden_size=16, intermediate_size=8, max_tokens_per_rank=32, dtype=torch.float32)
SIZES_OF = {"cpu": SIZES, "cuda": {**SIZES, "dtype": torch.bfloat16, "protocol": "nvlink"}}
T, K, H, INTER, E = 5, 2, 16, 8, 8

# (changed arguments, class, what the message must say)
LAYERS = [
    ({"num_experts": 0}, ArgumentError, "num_experts is 0, wanted an integer >= 1; the nearest valid value is 1"),
    ({"num_experts": "8"}, ArgumentTypeError, "num_experts is '8' (str), wanted an integer >= 1"),
    ({"num_experts": 8.0}, ArgumentTypeError, "num_experts is 8.0 (float), wanted an integer"),
    ({"top_k": 0}, ArgumentError, "top_k is 0, wanted an integer 1..8; the nearest valid value is 1"),
    ({"top_k": 9}, ArgumentError, "top_k is 9, wanted an integer 1..8; the nearest valid value is 8"),
    ({"top_k": 65, "num_experts": 128}, ArgumentError, "top_k is 65, wanted an integer 1..64; the nearest valid value is 64"),
    ({"top_k": True}, ArgumentTypeError, "top_k is True (bool), wanted an integer 1..8"),
    ({"top_k": None}, ArgumentTypeError, "top_k is None (NoneType), wanted an integer"),
    ({"hidden_size": 100}, ArgumentError,
     "hidden_size is 100, wanted a multiple of 8 (rows are moved in units of 16 bytes); the nearest valid values are 96 and 104"),
    ({"hidden_size": 3}, ArgumentError,
     "hidden_size is 3, wanted a multiple of 8 (rows are moved in units of 16 bytes); the nearest valid value is 8"),
    ({"hidden_size": 0}, ArgumentError, "hidden_size is 0, wanted an integer >= 1"),
    ({"intermediate_size": 0}, ArgumentError, "intermediate_size is 0, wanted an integer >= 1"),
    ({"max_tokens_per_rank": -5}, ArgumentError, "max_tokens_per_rank is -5, wanted an integer >= 1; the nearest valid value is 1"),
    ({"mode": "dp"}, ArgumentError, "mode is 'dp', wanted one of ep, tp"),
    ({"pattern": "fused"}, ArgumentError, "pattern is 'fused', wanted one of auto, mega, two_kernel, serial"),
    ({"protocol": "ib"}, ArgumentError, "protocol is 'ib', wanted one of auto, nvlink, pcie, staged, shm"),
    ({"dtype": torch.float64}, ArgumentTypeError, "dtype is torch.float64, wanted bfloat16 or float32"),
    ({"dtype": torch.float16}, ArgumentTypeError, "dtype is torch.float16, wanted bfloat16 or float32"),
    ({"dtype": "bfloat16"}, ArgumentTypeError, "dtype is bfloat16, wanted bfloat16 or float32"),
    ({"activation": "gelu"}, ArgumentError, "activation is 'gelu', wanted one of swiglu, gpt_oss or an Activation"),
    ({"activation": ["swiglu"]}, ArgumentError, "activation is ['swiglu'], wanted one of swiglu, gpt_oss or an Activation"),
    ({"swiglu_limit": 0}, ArgumentError, "swiglu_limit is 0, wanted a number > 0 and finite"),
    ({"swiglu_limit": float("nan")}, ArgumentError, "swiglu_limit is nan, wanted a number > 0 and finite"),
    ({"swiglu_limit": "7"}, ArgumentTypeError, "swiglu_limit is '7' (str), wanted a number > 0"),
    ({"weight_position": "after"}, ArgumentError, "weight_position is 'after', wanted one of before_l2, combine"),
    ({"timeout_s": 0}, ArgumentError, "timeout_s is 0, wanted seconds > 0 and finite"),
    ({"timeout_s": float("inf")}, ArgumentError, "timeout_s is inf, wanted seconds > 0 and finite"),
    ({"timeout_s": "10"}, ArgumentTypeError, "timeout_s is '10' (str), wanted seconds > 0"),
    ({"segments": 0}, ArgumentError, "segments is 0, wanted an integer >= 1"),
    ({"segments": 1.5}, ArgumentTypeError, "segments is 1.5 (float), wanted an integer >= 1"),
    ({"compute_blocks": 0}, ArgumentError, "compute_blocks is 0, wanted an integer >= 1"),
    ({"pull": "yes"}, ArgumentTypeError, "pull is 'yes', wanted True (receivers read rows) or False (owners write them)"),
]


OF_THE_CPU = ("pattern", "protocol", "dtype", "compute_blocks", "pull")  # each back end has its own choices
CUDA_LAYERS = [
    *(row for row in LAYERS if not set(row[0]) & set(OF_THE_CPU)),
    ({"pattern": "fused"}, ArgumentError, "pattern is 'fused', wanted one of auto, "),
    ({"dtype": torch.float32}, ArgumentTypeError,
     "dtype is torch.float32, wanted bfloat16 or float8_e4m3fn on the CUDA back end"),
    ({"row_block": 100}, ArgumentError, "row_block is 100, wanted one of 64, 128 or None"),
    ({"reserve_sms": -1}, ArgumentError, "reserve_sms is -1, wanted an integer >= 0"),
    ({"top_k": 33, "num_experts": 64}, ArgumentError, "top_k is 33, wanted 1..32 on the CUDA back end"),
]
ON_A_GPU = [  # found when its kernels are at hand; all others before anybody looks for a GPU
    ({"reserve_sms": 2000}, ArgumentError, "reserve_sms is 2000, wanted at most"),
    ({"activation": Activation(gate_limit=1.0)}, ArgumentError, "the CUDA back end wants both equal, or none"),
]


@pytest.mark.parametrize("backend, changed, kind, text", [
    *(pytest.param("cpu", *row, id=f"cpu-{row[0]}") for row in LAYERS),
    *(pytest.param("cuda", *row, id=f"cuda-{row[0]}") for row in CUDA_LAYERS),
    *(pytest.param("cuda", *row, id=f"cuda-{row[0]}", marks=needs(1)) for row in ON_A_GPU)])
def test_ops_04_arguments_of_a_layer(backend, changed, kind, text, nothing_left):
    with pytest.raises(kind, match=re.escape(text)) as caught:
        MoELayer(**{**SIZES_OF[backend], **changed})
    assert type(caught.value) is kind and isinstance(caught.value, ValueError)


@pytest.mark.parametrize("missing", ["num_experts", "top_k", "hidden_size", "intermediate_size", "max_tokens_per_rank"])
def test_sym_06_sizes_have_no_default(missing):
    with pytest.raises(TypeError, match=f"missing 1 required keyword-only argument: '{missing}'"):
        MoELayer(**{name: value for name, value in SIZES.items() if name != missing})


@pytest.mark.parametrize("form, text", [
    (dict(gate_limit=0.0), "Activation.gate_limit is 0.0, wanted a number > 0"),
    (dict(up_limit=-1), "Activation.up_limit is -1, wanted a number > 0"),
    (dict(alpha=float("nan")), "Activation.alpha is nan, wanted a finite number"),
    (dict(beta="1"), "Activation.beta is '1', wanted a finite number"),
])
def test_activation_values_that_no_kernel_would_follow(form, text):
    with pytest.raises(ArgumentError, match=re.escape(text)):
        Activation(**form)


def good_call(backend: str = "cpu") -> dict:
    return dict(hidden_states=torch.randn(T, H, dtype=SIZES_OF[backend]["dtype"]), topk_ids=torch.zeros(T, K, dtype=torch.int32),
                topk_weights=torch.ones(T, K), out=None)


# (changed arguments of a call, class, what the message must say)
CALLS = [
    ({"hidden_states": torch.zeros(T, H + 8)}, ArgumentError, "hidden_states has shape [5, 24], wanted [T, H] = [any, 16]"),
    ({"hidden_states": torch.zeros(T * H)}, ArgumentError, "hidden_states has shape [80], wanted [T, H] = [any, 16]"),
    ({"hidden_states": torch.zeros(T, H, dtype=torch.bfloat16)}, ArgumentTypeError,
     "hidden_states has dtype bfloat16, wanted float32"),
    ({"hidden_states": [[0.0] * H] * T}, ArgumentTypeError, "hidden_states must be a tensor [T, H], got list"),
    ({"hidden_states": None}, ArgumentTypeError, "hidden_states must be a tensor [T, H], got NoneType"),
    ({"hidden_states": torch.zeros(T, H, device="meta")}, ArgumentError,
     "hidden_states is on meta, but this layer runs on the CPU back end"),
    ({"hidden_states": torch.zeros(T, H).to_sparse()}, ArgumentTypeError,
     "hidden_states has layout torch.sparse_coo, wanted a dense tensor"),
    ({"topk_ids": torch.zeros(T, K)}, ArgumentTypeError, "topk_ids has dtype float32, wanted int32 or int64"),
    ({"topk_ids": torch.zeros(T, K), "topk_weights": torch.zeros(T, K, dtype=torch.int32)}, ArgumentTypeError,
     "are they swapped? The order is (hidden_states, topk_ids, topk_weights)"),
    ({"topk_ids": torch.zeros(T - 1, K, dtype=torch.int64)}, ArgumentError, "topk_ids has shape [4, 2], wanted [T, k] = [5, 2]"),
    ({"topk_ids": torch.zeros(T, K + 1, dtype=torch.int64)}, ArgumentError, "topk_ids has shape [5, 3], wanted [T, k] = [5, 2]"),
    ({"topk_ids": torch.zeros(T, dtype=torch.int64)}, ArgumentError, "topk_ids has shape [5], wanted [T, k] = [5, 2]"),
    ({"topk_weights": torch.zeros(T, K, 1)}, ArgumentError, "topk_weights has shape [5, 2, 1], wanted [T, k] = [5, 2]"),
    ({"topk_weights": torch.full((T, K), float("nan"))}, ArgumentError,
     "topk_weights[0, 0] is nan on rank 0, wanted a finite number"),
    ({"topk_weights": torch.tensor([[1.0, 1.0]] * 4 + [[1.0, float("-inf")]])}, ArgumentError,
     "topk_weights[4, 1] is -inf on rank 0"),
    ({"topk_weights": None}, ArgumentTypeError, "topk_weights must be a tensor [T, k], got NoneType"),
    ({"out": torch.zeros(T + 1, H)}, ArgumentError, "out has shape [6, 16], wanted [T, H] = [5, 16]"),
    ({"out": torch.zeros(T, H, dtype=torch.float64)}, ArgumentTypeError, "out has dtype float64, wanted float32"),
    ({"out": torch.zeros(H, T).T}, ArgumentError, "out has strides (1, 5), wanted a contiguous tensor"),
]


BF16 = torch.bfloat16
CUDA_CALLS = [
    *(row for row in CALLS if set(row[0]) <= {"topk_ids", "topk_weights"} and "on rank 0" not in row[2]),  # values stay on the GPU
    ({"hidden_states": torch.zeros(T, H + 8, dtype=BF16)}, ArgumentError,
     "hidden_states has shape [5, 24], wanted [T, H] = [any, 16]"),
    ({"hidden_states": torch.zeros(T, H)}, ArgumentTypeError, "hidden_states has dtype float32, wanted bfloat16"),
    ({"hidden_states": None}, ArgumentTypeError, "hidden_states must be a tensor [T, H], got NoneType"),
    ({"hidden_states": torch.zeros(T, H, device="meta", dtype=BF16)}, ArgumentError,
     "hidden_states is on meta, but this layer runs on cuda"),
    ({"hidden_states": torch.zeros(T, H, dtype=BF16).to_sparse()}, ArgumentTypeError,
     "hidden_states has layout torch.sparse_coo, wanted a dense tensor"),
    ({"hidden_states": torch.zeros(33, H, dtype=BF16)}, CapacityError, "rank 0 had 33 tokens, more than max_tokens_per_rank=32"),
    ({"out": torch.zeros(T + 1, H, dtype=BF16)}, ArgumentError, "out has shape [6, 16], wanted [T, H] = [5, 16]"),
    ({"out": torch.zeros(T, H)}, ArgumentTypeError, "out has dtype float32, wanted bfloat16"),
    ({"out": torch.zeros(H, T, dtype=BF16).T}, ArgumentError, "out has strides (1, 5)"),
]


@pytest.mark.parametrize("backend, changed, kind, text", [
    *(pytest.param("cpu", *row, id=f"cpu-{'+'.join(row[0])}-{i}") for i, row in enumerate(CALLS)),
    *(pytest.param("cuda", *row, id=f"cuda-{'+'.join(row[0])}-{i}", marks=needs(1)) for i, row in enumerate(CUDA_CALLS))])
def test_ops_04_arguments_of_a_call(backend, changed, kind, text, nothing_left):
    case = LayerCase(((T,),), ("uniform",), E, K, H, INTER, 32).on(backend)
    layer = case.layer()
    right = {name: moved(value, device_of(layer)) for name, value in good_call(backend).items()}
    with pytest.raises(kind, match=re.escape(text)) as caught:
        layer(**{**right, **{name: moved(value, device_of(layer)) for name, value in changed.items()}})
    assert type(caught.value) is kind
    layer(**right)
    layer.synchronize()


def test_a_tensor_of_the_cpu_is_refused_by_a_layer_on_a_gpu_and_the_other_way(nothing_left):
    """That it says where the tensor is and where the layer runs; the other way needs a GPU."""
    layer = LayerCase(((T,),), ("uniform",), E, K, H, INTER, 32).layer()
    devices = ["meta", *(["cuda"] if torch.cuda.is_available() else [])]
    for device in devices:
        with pytest.raises(ArgumentError, match=f"hidden_states is on {device}.*, but this layer runs on the CPU back end"):
            layer(**{**good_call(), "hidden_states": torch.zeros(T, H, device=device)})


# (w13, w2, flags, what the message must say)
WEIGHTS = [
    (torch.zeros(E, 2 * INTER, H + 8), torch.zeros(E, H, INTER), {},
     "w13 has shape [8, 16, 24], wanted [E_local, 2I, H] = [8, 16, 16]"),
    (torch.zeros(E - 1, 2 * INTER, H), torch.zeros(E, H, INTER), {},
     "w13 has shape [7, 16, 16], wanted [E_local, 2I, H] = [8, 16, 16]"),
    (torch.zeros(E, 2 * INTER, H), torch.zeros(E, INTER, H), {}, "w2 has shape [8, 8, 16], wanted [E_local, H, I] = [8, 16, 8]"),
    (torch.zeros(E, H, 2 * INTER), torch.zeros(E, H, INTER), {"transposed": True},
     "w2 has shape [8, 16, 8], wanted [E_local, I, H] = [8, 8, 16]"),
    (torch.zeros(E, 2 * INTER, H).half(), torch.zeros(E, H, INTER), {}, "w13 has dtype float16, wanted float32"),
    (torch.zeros(E, 2 * INTER, H), None, {}, "w2 must be a tensor [E_local, H, I], got NoneType"),
]


@pytest.mark.parametrize("w13, w2, flags, text", WEIGHTS, ids=[text[:30] for *_, text in WEIGHTS])
@on_both
def test_ops_04_arguments_of_load_weights(backend, w13, w2, flags, text, nothing_left):
    dtype = SIZES_OF[backend]["dtype"]
    layer = MoELayer(**SIZES_OF[backend])
    given = [w.to(dtype) if isinstance(w, torch.Tensor) and w.dtype == torch.float32 else w for w in (w13, w2)]
    with pytest.raises(ArgumentError, match=re.escape(text.replace("float32", str(dtype)[6:]))):
        load(layer, *given, **flags)
    with pytest.raises(ArgumentError, match=re.escape("the layer has no weights: call load_weights(w13, w2) first")):
        call(layer, *list(good_call(backend).values())[:3])


ESTIMATES = [
    ({"world": 0}, "world is 0, wanted an integer >= 1"), ({"world": 64}, "world is 64, wanted 1..63"),
    ({"rank": 2}, "rank is 2, wanted an integer 0..1; the nearest valid value is 1"),
    ({"top_k": 0}, "top_k is 0, wanted an integer 1..8"),
    ({"hidden_size": 12}, "the nearest valid values are 8 and 16"), ({"mode": "x"}, "mode is 'x', wanted one of ep, tp"),
    ({"dtype": "float64"}, "dtype is float64, wanted one of bfloat16, float32"),
    ({"pattern": "x"}, "pattern is 'x', wanted one of auto"),
    ({"mode": "tp", "intermediate_size": 1}, "intermediate_size is 1, wanted an integer >= 2"),
]


@pytest.mark.parametrize("changed, text", ESTIMATES, ids=[str(changed) for changed, _ in ESTIMATES])
def test_ops_04_arguments_of_the_memory_estimate(changed, text):
    with pytest.raises(ArgumentError, match=re.escape(text)):
        moe_tk.estimate_memory(**{**SIZES, "dtype": "float32", "world": 2, **changed})


@pytest.mark.parametrize("value", ["ib", "NVLINK"])
def test_ops_04_protocol_from_the_environment(value, monkeypatch, nothing_left):
    monkeypatch.setenv("MOE_TK_PROTOCOL", value)
    with pytest.raises(ArgumentError, match=f"MOE_TK_PROTOCOL is '{value}', wanted one of auto, nvlink, pcie, staged, shm"):
        MoELayer(**SIZES)
    monkeypatch.setenv("MOE_TK_PROTOCOL", "shm")
    assert "protocol shm: set by MOE_TK_PROTOCOL" in MoELayer(**SIZES).plan.explain()


def test_ops_04_every_refusal_is_one_line():
    """No message of the tables above has a line break, and all are below 300 characters."""
    for changed, _, _ in LAYERS:
        with pytest.raises(MoETkError) as caught:
            MoELayer(**{**SIZES, **changed})
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 300


ID_DTYPES = {torch.int32: True, torch.int64: True, torch.int16: False, torch.uint8: False, torch.int8: False, torch.float32: False}
WEIGHT_DTYPES = {torch.float32: True, torch.bfloat16: True, torch.float16: False, torch.float64: False, torch.int64: False}


@on_both
def test_num_04_ids_and_weights_of_any_type_are_right_or_refused(backend, nothing_left):
    """int32 and int64 ids give equal bits, bf16 weights become float32; others are TypeErrors that name the valid types."""
    case = LayerCase(((40,),), ("uniform",)).on(backend)
    layer = case.layer()
    hidden, ids, weights = case.inputs(0, 1, 0)
    weights = weights.bfloat16().float()  # the same values in every type
    wanted = digest(call(layer, hidden, ids, weights))
    for dtype, accepted in ID_DTYPES.items():
        if accepted:
            assert digest(call(layer, hidden, ids.to(dtype), weights)) == wanted
            continue
        with pytest.raises(TypeError, match=f"topk_ids has dtype {str(dtype)[6:]}, wanted int32 or int64"):
            call(layer, hidden, ids.to(dtype), weights)
    for dtype, accepted in WEIGHT_DTYPES.items():
        if accepted:
            assert digest(call(layer, hidden, ids, weights.to(dtype))) == wanted
            continue
        with pytest.raises(TypeError, match=f"topk_weights has dtype {str(dtype)[6:]}, wanted float32 or bfloat16"):
            call(layer, hidden, ids, weights.to(dtype))


def _strided(tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """The same values with other strides; what lies between them is garbage."""
    rows, columns = tensor.shape
    garbage = torch.full((rows, 2 * columns), 3 if not tensor.is_floating_point() else float("nan"), dtype=tensor.dtype,
                         device=tensor.device)
    wide = torch.cat([tensor, garbage], dim=1)[:, :columns]
    every_second = garbage.clone()
    every_second[:, ::2] = tensor
    every_second = every_second[:, ::2]
    offset = torch.cat([garbage[:1, :columns], tensor])[1:]
    return {"wide": wide, "every second": every_second, "transposed": tensor.T.contiguous().T, "offset": offset}


@pytest.mark.parametrize("how", ["wide", "every second", "transposed", "offset"])
@on_both
def test_num_05_strides_are_honoured(backend, how, nothing_left):
    """Slices of wider tensors, steps, transposes: the bits of the contiguous call."""
    layer, inputs = layer_and_inputs(backend)
    wanted = digest(layer(*inputs).cpu())
    for place in range(3):
        given = list(inputs)
        given[place] = _strided(inputs[place])[how]
        assert digest(layer(*given).cpu()) == wanted


def layer_and_inputs(backend: str) -> tuple[MoELayer, list[torch.Tensor]]:
    """A layer with weights, and inputs on its device."""
    case = LayerCase(((40,),), ("uniform",)).on(backend)
    layer = case.layer()
    return layer, [moved(tensor, device_of(layer)) for tensor in case.inputs(0, 1, 0)]


@on_both
def test_num_05_expanded_inputs(backend, nothing_left):
    layer, (hidden, ids, weights) = layer_and_inputs(backend)
    row = hidden[:1].expand(40, -1), ids[:1].expand(40, -1), weights[:1, :1].expand(40, 3)
    assert digest(layer(*row).cpu()) == digest(layer(*(tensor.clone() for tensor in row)).cpu())


@on_both
def test_num_05_no_large_silent_copy(monkeypatch, backend, nothing_left):
    """Above the stated size a strided input is refused, with the size and the remedy."""
    from moe_tk import arguments

    layer, (hidden, ids, weights) = layer_and_inputs(backend)
    monkeypatch.setattr(arguments, "COPY_LIMIT_BYTES", 40 * 40 * hidden.element_size() - 1)
    with pytest.raises(ArgumentError, match=r"hidden_states has strides \(1, 40\) .* pass hidden_states.contiguous\(\)"):
        layer(hidden.T.contiguous().T, ids, weights)
    layer(hidden, ids, weights)
