"""The e4m3 layer on the CUDA back end as far as it can be checked without a GPU: sizes, memory, weights, arguments."""

from __future__ import annotations

from types import SimpleNamespace

import emulated
import pytest
import torch

import moe_tk
from moe_tk import reference
from moe_tk.cuda_layer import CudaMoELayer
from moe_tk.errors import ArgumentError, ArgumentTypeError
from moe_tk.memory.layout import ALIGNMENT
from moe_tk.memory.nvlink_layout import NvlinkGeometry, nvlink_estimate, row_items, symmetric_items
from moe_tk.ops.grouped_gemm import grouped_gemm
from moe_tk.runtime.nvlink_fp8 import layer_weights
from moe_tk.weights import gemm as gemm_weights

E4M3 = torch.float8_e4m3fn


def geometry(**changes) -> NvlinkGeometry:
    return NvlinkGeometry(**{**dict(world=2, rank=0, max_tokens=512, top_k=4, num_experts=30, hidden=1024, intermediate_size=256,
                                    mode="ep", max_segments=2, dtype="float8_e4m3fn"), **changes})


@pytest.mark.parametrize("hidden, row_bytes", [(128, 256), (2048, 2176), (4096, 4224), (7168, 7424)])
def test_a_row_and_its_scales_are_one_stretch(hidden, row_bytes):
    g = geometry(hidden=hidden)
    assert g.row_bytes == row_bytes >= hidden + 4 * (hidden // 128) and g.row_bytes % 128 == 0
    assert {item.name: item.bytes for item in symmetric_items(g)}["rows"] == 2 * 512 * row_bytes
    assert geometry(hidden=hidden, dtype="bfloat16").row_bytes == 2 * hidden


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("mode", ["ep", "tp"])
def test_sym_05_items_hold_activations_scales_and_outputs_apart(world, mode):
    g = geometry(world=world, mode=mode, intermediate_size=256 * world)
    placed = row_items(g)
    for before, after in zip(placed, placed[1:], strict=False):
        assert before.offset + before.bytes <= after.offset and after.offset % ALIGNMENT == 0
    named = {item.name: item.bytes for item in placed}
    inter = g.local_intermediate
    assert named == {"activated": g.max_slots * inter, "activated_scales": g.max_slots * inter // 128 * 4,
                     "expert_out": g.max_slots * 1024 * 2}
    assert g.max_slots % 4 == 0, "a row of scales starts at a multiple of 16 bytes"
    exported = {item.name: item.bytes for item in symmetric_items(g)}["rows"]
    assert exported > 0, "a process alone quantises its rows too"
    estimate = nvlink_estimate(g)
    assert estimate.total == estimate.symmetric_bytes + estimate.local_bytes


@pytest.mark.parametrize("hidden", [128, 1152, 7168])
@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
def test_sym_05_a_serial_call_gathers_its_rows_where_the_outputs_come_later(hidden, dtype):
    rank = emulated.Rank(geometry(hidden=hidden, dtype=dtype))
    fields, outputs = rank.fields([0, 0]), rank.items["expert_out" if dtype == "float8_e4m3fn" else "slot_rows"]
    assert fields["slot_rows"] == fields["expert_out"] == outputs.address
    if dtype == "bfloat16":
        assert fields["slot_scales"] == 0
        return
    slots = fields["max_slots"]
    scales = slice(fields["slot_scales"], fields["slot_scales"] + 4 * slots * hidden // 128)
    assert fields["slot_rows"] + slots * hidden == scales.start and scales.start % 16 == 0  # of a bulk copy
    assert scales.stop <= outputs.address + len(outputs.bytes)


@pytest.mark.parametrize("pattern", ["serial", "two_kernel", "auto"])
def test_e4m3_layers_take_any_pattern(pattern, monkeypatch):
    class Reached(Exception):
        pass

    def calls(*args, pattern: str, **options) -> None:
        raise Reached(pattern)

    monkeypatch.setattr("moe_tk.cuda_layer.own_device", lambda group, device: torch.device("cpu"))
    monkeypatch.setattr("moe_tk.cuda_layer.NvlinkLayer", calls)
    with pytest.raises(Reached, match=f"^{pattern}$"):
        moe_tk.MoELayer(num_experts=64, top_k=8, hidden_size=4096, intermediate_size=3072, max_tokens_per_rank=64, dtype=E4M3,
                        protocol="nvlink", pattern=pattern)


def test_estimate_memory_knows_the_back_end_and_the_dtype():
    sizes = dict(world=2, rank=1, num_experts=30, top_k=4, max_tokens_per_rank=512, intermediate_size=256, segments=2)
    for dtype in ("bfloat16", E4M3):
        name = str(dtype).removeprefix("torch.")
        estimate = moe_tk.estimate_memory(hidden_size=1024, protocol="nvlink", dtype=dtype, **sizes)
        assert estimate == nvlink_estimate(geometry(rank=1, dtype=name))
    assert moe_tk.estimate_memory(hidden_size=1024, **sizes).total != estimate.total
    with pytest.raises(ArgumentError, match="protocol is 'pcie', wanted 'shm' or 'nvlink'"):
        moe_tk.estimate_memory(hidden_size=1024, protocol="pcie", **sizes)
    with pytest.raises(ArgumentError, match="hidden_size is 1000"):
        moe_tk.estimate_memory(hidden_size=1000, protocol="nvlink", dtype="float8_e4m3fn", **sizes)


def test_the_dtype_is_part_of_what_ranks_agree_on():
    assert geometry().shared_key() != geometry(dtype="bfloat16").shared_key()


@pytest.mark.parametrize("changes, text", [
    (dict(hidden=1000), "hidden_size is 1000; .*multiple of 128,.*nearest: 896 or 1024"),
    (dict(hidden=64), "hidden_size is 64; .*nearest: 128"),
    (dict(intermediate_size=200), "intermediate_size is 200; .*nearest: 128 or 256"),
    (dict(mode="tp", intermediate_size=384), r"intermediate_size is 384; .*multiple of 256 \(128 for each rank\).*: 256 or 512"),
    (dict(dtype="float16"), "dtype is float16, wanted one of bfloat16, float8_e4m3fn")])
def test_sizes_that_scales_do_not_fit_are_refused_with_the_nearest(changes, text):
    with pytest.raises(ArgumentError, match=text):
        geometry(**changes)


def test_bfloat16_keeps_its_freedom():
    assert geometry(hidden=1000, intermediate_size=200, dtype="bfloat16").padded_intermediate == 200


@pytest.mark.parametrize("options, error, text", [
    (dict(dtype=torch.float16), ArgumentTypeError, "dtype is torch.float16, wanted bfloat16 or float8_e4m3fn"),
    (dict(pattern="mega"), ArgumentError, "pattern is 'mega', wanted one of auto, two_kernel, serial"),
    (dict(hidden_size=4160), ArgumentError, "hidden_size is 4160")])
def test_arguments_are_checked_before_a_gpu_is_needed(options, error, text, monkeypatch):
    monkeypatch.setattr("moe_tk.cuda_layer.own_device", lambda group, device: torch.device("cpu"))
    sizes = dict(num_experts=64, top_k=8, hidden_size=4096, intermediate_size=3072, max_tokens_per_rank=64)
    with pytest.raises(error, match=text):
        moe_tk.MoELayer(**{**sizes, "dtype": E4M3, "protocol": "nvlink", **options})


def weights(experts: int = 3, inter: int = 256, hidden: int = 384) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(3)
    return (torch.randn(experts, 2 * inter, hidden, generator=draw).bfloat16(),
            torch.randn(experts, hidden, inter, generator=draw).bfloat16())


def scaled(w13: torch.Tensor, w2: torch.Tensor) -> list[torch.Tensor]:
    (q13, s13), (q2, s2) = gemm_weights.quantise_weights(w13), gemm_weights.quantise_weights(w2)
    return [q13, q2, s13, s2]


def test_weights_as_the_kernels_read_them_give_the_layer():
    """Both GEMMs of the host engine over the prepared weights, against float64 over the checkpoint's values."""
    w13, w2 = weights()
    q13, q2, s13, s2 = scaled(w13, w2)
    kept = layer_weights(q13, q2, s13, s2)
    offsets = torch.tensor([0, 64, 128, 192], dtype=torch.int32)
    x = torch.randn(192, 384, generator=torch.Generator().manual_seed(4))
    rows, scales = gemm_weights.quantise_rows(x)
    act, act_scales = grouped_gemm(rows, kept.w13, offsets, row_block=64, activation="swiglu", x_scale=scales,
                                   w_scale=kept.w13_scales)
    out = grouped_gemm(act, kept.w2, offsets, row_block=64, x_scale=act_scales, w_scale=kept.w2_scales)
    ids = torch.arange(3).repeat_interleave(64)[:, None]
    want = reference.moe_layer(gemm_weights.dequantise_rows(rows, scales), ids, torch.ones(192, 1),
                               gemm_weights.dequantise_weights(q13, s13), gemm_weights.dequantise_weights(q2, s2))
    assert reference.relative_error(out, want) <= reference.ERROR_BUDGET[E4M3]


def test_bfloat16_weights_are_quantised_as_a_whole():
    w13, w2 = weights()
    once, apart = layer_weights(*scaled(w13, w2)), layer_weights(w13, w2, None, None)
    for name in ("w13", "w2", "w13_scales", "w2_scales"):
        assert torch.equal(getattr(once, name).view(torch.uint8), getattr(apart, name).view(torch.uint8)), name


def test_a_rank_without_experts_has_something_to_point_at():
    kept = layer_weights(*(w[:0] for w in weights()), None, None)
    assert kept.w13.shape == (1, 512, 384) and kept.w2_scales.shape == (1, 3, 2, 2)


class Calls:
    """Takes what a layer hands on."""

    w13 = object()
    geometry = SimpleNamespace(num_local_experts=3, local_intermediate=256)

    def load_weights(self, *args) -> None:
        self.args = args


def bare_layer(dtype: torch.dtype = E4M3) -> CudaMoELayer:
    layer = CudaMoELayer.__new__(CudaMoELayer)
    layer._calls, layer.device, layer.dtype = Calls(), torch.device("cpu"), dtype
    layer.hidden_size, layer.top_k, layer.max_tokens_per_rank = 384, 2, 16
    return layer


@pytest.mark.parametrize("transposed", [False, True])
def test_a_checkpoint_is_taken_with_its_scales(transposed, monkeypatch):
    monkeypatch.setattr("torch.cuda.device", lambda device: torch.no_grad())
    tensors = scaled(*weights())
    given = [tensor.transpose(1, 2) for tensor in tensors] if transposed else tensors
    layer = bare_layer()
    layer.load_weights(*given[:2], w13_scale=given[2], w2_scale=given[3], transposed=transposed)
    assert all(torch.equal(a.contiguous().view(torch.uint8), b.view(torch.uint8)) for a, b in zip(layer._calls.args, tensors,
                                                                                                   strict=True))


@pytest.mark.parametrize("change, error, text", [
    (lambda q: (q[0], q[1], None, q[3]), ArgumentError, "w13_scale is wanted"),
    (lambda q: (q[0], q[1], q[2], None), ArgumentError, "w2_scale is wanted"),
    (lambda q: (q[0], q[1], q[2][:, :2], q[3]), ArgumentError, "w13_scale has shape.*2I/128, H/128"),
    (lambda q: (q[0], q[1], q[2], q[3].double()), ArgumentTypeError, "w2_scale has dtype float64"),
    (lambda q: (weights()[0], q[1], None, q[3]), ArgumentTypeError, "wanted one dtype for both"),
    (lambda q: (*weights(), q[2], q[3]), ArgumentError, "w13_scale is given, but w13 is torch.bfloat16"),
    (lambda q: (q[0].float(), q[1].float(), None, None), ArgumentTypeError, "w13 has dtype float32")])
def test_wrong_weights_are_refused(change, error, text):
    w13, w2, w13_scale, w2_scale = change(scaled(*weights()))
    with pytest.raises(error, match=text):
        bare_layer().load_weights(w13, w2, w13_scale=w13_scale, w2_scale=w2_scale)


def test_interleaved_scales_are_refused():
    q13, q2, s13, s2 = scaled(*weights())
    with pytest.raises(ArgumentError, match="gate and up would share scales"):
        bare_layer().load_weights(q13, q2, w13_scale=s13, w2_scale=s2, interleaved=True)


def test_a_bfloat16_layer_takes_neither_e4m3_nor_scales():
    layer, (q13, q2, s13, s2) = bare_layer(torch.bfloat16), scaled(*weights())
    with pytest.raises(ArgumentTypeError, match="w13 has dtype float8_e4m3fn, wanted bfloat16"):
        layer.load_weights(q13, q2, w13_scale=s13, w2_scale=s2)
    with pytest.raises(ArgumentError, match="w13_scale is given"):
        layer.load_weights(*weights(), w13_scale=s13, w2_scale=s2)


def test_results_are_bfloat16_and_rows_may_be_quantised():
    x, ids, routing = torch.zeros(8, 384, dtype=torch.bfloat16), torch.zeros(8, 2, dtype=torch.int64), torch.ones(8, 2)
    rows, scales = gemm_weights.quantise_rows(x)
    layer = bare_layer()
    for given, given_scales in ((x, None), (rows, scales.t())):
        hidden, _, _, out = layer._check_arguments(given, ids, routing, None)
        kept = layer._check_hidden_scales(hidden, given_scales)
        assert out.dtype == torch.bfloat16 and hidden.dtype == given.dtype
        assert kept is None if given_scales is None else kept.is_contiguous()
    with pytest.raises(ArgumentError, match="hidden_scales .* are wanted"):
        layer._check_hidden_scales(rows, None)
    with pytest.raises(ArgumentError, match="scales belong to float8_e4m3fn"):
        layer._check_hidden_scales(x, scales.t())
    with pytest.raises(ArgumentError, match="hidden_scales has shape"):
        layer._check_hidden_scales(rows, scales)
    with pytest.raises(ArgumentTypeError, match="out has dtype float8_e4m3fn"):
        layer._check_arguments(x, ids, routing, rows)
