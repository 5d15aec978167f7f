"""moe_tk.ops.grouped_gemm against float64, on the host engine and on the wgmma engine: every element, poisoned outputs."""

from __future__ import annotations

import pytest
import torch
from gemm_cases import Layout, form_arguments, oracle, quantised_operands, random_rows, relative_error

from moe_tk.errors import ArgumentError
from moe_tk.ops import grouped_gemm, interleave_gate_up

COUNTS = [(128,), (1,), (0, 0, 8), (200, 0, 3, 129), (17,) * 9, (65, 0, 640, 1)]
SIZES = [(256, 64), (320, 448), (768, 320), (64, 192)]
GENERATOR_SEED = 5


def generator(device):
    return torch.Generator(device=device).manual_seed(GENERATOR_SEED)


@pytest.mark.parametrize("row_block", [64, 128])
@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize("columns,depth", SIZES)
def test_product_of_every_expert(device, counts, columns, depth, row_block):
    layout = Layout(counts, row_block, device)
    offsets, rows = layout.tensors()
    x = random_rows(layout, depth, generator(device)).bfloat16()
    w = torch.randn(len(counts), columns, depth, generator=generator(device), device=device).bfloat16()
    whole = torch.full((layout.num_slots + 8, columns + 64), torch.nan, dtype=torch.bfloat16, device=device)
    out = whole[: layout.num_slots, :columns]
    got = grouped_gemm(x, w, offsets, expert_rows=rows, row_block=row_block, out=out)
    real, want = layout.real_rows(), oracle(x, w, layout, None, None)
    assert got is out
    assert relative_error(got[real], want[real]) <= 2.5e-3
    assert whole[layout.num_slots:].isnan().all() and whole[:, columns:].isnan().all(), "written outside of out"
    first = got[real].clone()
    out.fill_(torch.nan)
    again = grouped_gemm(x, w, offsets, expert_rows=rows, row_block=row_block, out=out)
    assert torch.equal(again[real].view(torch.int16), first.view(torch.int16)), "a repeat differs in a bit"


@pytest.mark.parametrize("row_block", [64, 128])
@pytest.mark.parametrize("form", ["swiglu", "clamped", "gpt-oss"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("counts", COUNTS[3:], ids=str)
def test_swiglu_in_the_epilogue(device, counts, form, weighted, row_block):
    layout = Layout(counts, row_block, device)
    offsets, rows = layout.tensors()
    x = random_rows(layout, 256, generator(device)).bfloat16()
    w13 = (torch.randn(len(counts), 384, 256, generator=generator(device), device=device) / 8).bfloat16()
    weight = torch.rand(layout.num_slots, generator=generator(device), device=device) + 0.5 if weighted else None
    got = grouped_gemm(x, interleave_gate_up(w13), offsets, expert_rows=rows, row_block=row_block, slot_weight=weight,
                       **form_arguments(form))
    real, want = layout.real_rows(), oracle(x, w13, layout, form, weight)
    assert got.shape == (layout.num_slots, 192)
    assert relative_error(got[real], want[real]) <= 3e-3


@pytest.mark.parametrize("row_block", [64, 128])
@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize("columns,depth", [(256, 128), (320, 512), (1088, 384)])
def test_e4m3_product_with_block_scales(device, counts, columns, depth, row_block):
    layout = Layout(counts, row_block, device)
    offsets, rows = layout.tensors()
    spread = torch.exp(torch.randn(layout.num_slots, depth // 128, generator=generator(device), device=device))
    x = random_rows(layout, depth, generator(device)) * spread.repeat_interleave(128, 1)
    w = torch.randn(len(counts), columns, depth, generator=generator(device), device=device)
    w *= torch.exp(torch.randn(len(counts), columns, 1, generator=generator(device), device=device))
    xq, x_scale, wq, pairs, x_values, w_values = quantised_operands(x, w, gate_up=False)
    xq.view(torch.uint8)[~layout.real_rows()] = 0x7F
    x_scale[:, ~layout.real_rows()] = torch.nan
    got = grouped_gemm(xq, wq, offsets, expert_rows=rows, row_block=row_block, x_scale=x_scale, w_scale=pairs)
    real, want = layout.real_rows(), oracle(x_values, w_values, layout, None, None)
    assert got.dtype == torch.bfloat16
    assert relative_error(got[real], want[real]) <= 3e-3


@pytest.mark.parametrize("row_block", [64, 128])
@pytest.mark.parametrize("form", ["swiglu", "clamped", "gpt-oss"])
@pytest.mark.parametrize("counts", COUNTS[3:], ids=str)
def test_e4m3_swiglu_quantises_anew(device, counts, form, row_block):
    layout = Layout(counts, row_block, device)
    offsets, rows = layout.tensors()
    x = random_rows(layout, 384, generator(device))
    w13 = torch.randn(len(counts), 768, 384, generator=generator(device), device=device) / 10
    weight = torch.rand(layout.num_slots, generator=generator(device), device=device) + 0.5
    xq, x_scale, wq, pairs, x_values, w_values = quantised_operands(x, w13, gate_up=True)
    got, scales = grouped_gemm(xq, wq, offsets, expert_rows=rows, row_block=row_block, x_scale=x_scale, w_scale=pairs,
                               slot_weight=weight, **form_arguments(form))
    real, want = layout.real_rows(), oracle(x_values, w_values, layout, form, weight)
    assert got.dtype == torch.float8_e4m3fn and scales.shape == (3, layout.num_slots)
    largest = want[real].view(-1, 3, 128).abs().amax(-1)
    assert ((scales.t()[real] * 448 - largest).abs() <= 0.01 * largest).all(), "a scale is not the row's largest / 448"
    values = got.float() * scales.t().repeat_interleave(128, 1)
    assert relative_error(values[real], want[real]) <= 0.035
    worst = (values[real] - want[real]).abs().view(-1, 3, 128).amax(-1) / largest
    assert worst.max() <= 0.045, "a value is off by more than an e4m3 step of the row's largest"


@pytest.mark.parametrize("row_block", [64, 128])
def test_no_rows_at_all(device, row_block):
    x = torch.randn(row_block, 128, device=device).bfloat16()
    w = torch.randn(3, 256, 128, device=device).bfloat16()
    out = torch.full((row_block, 256), 7.0, dtype=torch.bfloat16, device=device)
    grouped_gemm(x, w, torch.zeros(4, dtype=torch.int32, device=device), row_block=row_block, out=out)
    assert (out == 7.0).all(), "rows of no expert were written"
    assert grouped_gemm(x[:0], w, torch.zeros(4, dtype=torch.int32, device=device), row_block=row_block).shape == (0, 256)


@pytest.mark.parametrize("change,word", [
    ({"columns": 96}, "nearest: 64 or 128"), ({"depth": 72}, "nearest: 64 or 128"), ({"activation": "gelu"}, "swiglu"),
    ({"scale": True}, "not taken"), ({"offsets": torch.int64}, "int32"), ({"columns": 192, "activation": "swiglu"}, "128 or 256"),
])
def test_wrong_arguments_say_what_is_valid(device, change, word):
    x = torch.zeros(128, change.get("depth", 64), dtype=torch.bfloat16, device=device)
    w = torch.zeros(2, change.get("columns", 128), x.shape[1], dtype=torch.bfloat16, device=device)
    offsets = torch.zeros(3, dtype=change.get("offsets", torch.int32), device=device)
    scale = torch.zeros(1, 128, device=device) if change.get("scale") else None
    with pytest.raises(ArgumentError, match=word):
        grouped_gemm(x, w, offsets, activation=change.get("activation"), x_scale=scale)


@pytest.mark.gpu
def test_replay_of_a_captured_graph_sees_new_rows_and_offsets(hopper):
    layouts = [Layout(counts, 128, hopper) for counts in ((300, 0, 20), (0, 250, 100))]
    w = torch.randn(3, 512, 256, device=hopper).bfloat16()
    x = torch.zeros(640, 256, dtype=torch.bfloat16, device=hopper)
    offsets, rows = torch.zeros(4, dtype=torch.int32, device=hopper), torch.zeros(3, dtype=torch.int32, device=hopper)
    out = torch.empty(640, 512, dtype=torch.bfloat16, device=hopper)
    grouped_gemm(x, w, offsets, expert_rows=rows, out=out)  # builds the module outside of the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        grouped_gemm(x, w, offsets, expert_rows=rows, out=out)
    for layout in layouts:
        new_offsets, new_rows = layout.tensors()
        offsets.copy_(new_offsets)
        rows.copy_(new_rows)
        x[: layout.num_slots].copy_(random_rows(layout, 256, generator(hopper)).bfloat16())
        out.fill_(torch.nan)
        graph.replay()
        real, want = layout.real_rows(), oracle(x[: layout.num_slots], w, layout, None, None)
        assert relative_error(out[: layout.num_slots][real], want[real]) <= 2.5e-3
