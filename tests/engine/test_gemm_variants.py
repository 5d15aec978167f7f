"""Every compiled tile configuration, and the counter hooks, on a GPU."""

from __future__ import annotations

import pytest
import torch
from gemm_cases import Layout, form_arguments, oracle, quantised_operands, random_rows, relative_error

from moe_tk.ops import grouped_gemm, interleave_gate_up
from moe_tk.runtime import gemm

pytestmark = pytest.mark.gpu
COUNTS = (385, 900, 0, 2, 64, 129)
SECOND_NS = 10**9


def test_every_bf16_tile(hopper):
    for variant in gemm.variants(hopper, "bf16"):
        layout = Layout(COUNTS, variant["block_m"], hopper)
        offsets, rows = layout.tensors()
        x = random_rows(layout, 1024, torch.Generator(hopper).manual_seed(1)).bfloat16()
        w = torch.randn(len(COUNTS), 1088, 1024, device=hopper).bfloat16()
        for form in (None, "swiglu"):
            weights = w if form is None else w[:, :1024].contiguous()
            prepared = weights if form is None else interleave_gate_up(weights)
            got = grouped_gemm(x, prepared, offsets, expert_rows=rows, row_block=layout.row_block, tile=variant["name"],
                               **form_arguments(form))
            real, want = layout.real_rows(), oracle(x, weights, layout, form, None)
            assert relative_error(got[real], want[real]) <= 3e-3, variant


def test_every_e4m3_tile(hopper):
    for variant in gemm.variants(hopper, "e4m3"):
        layout = Layout(COUNTS, variant["block_m"], hopper)
        offsets, rows = layout.tensors()
        x = random_rows(layout, 1024, torch.Generator(hopper).manual_seed(1))
        for form in (None, "swiglu") if variant["swiglu"] else (None,):
            w = torch.randn(len(COUNTS), 1024, 1024, device=hopper) / 16
            xq, x_scale, wq, pairs, x_values, w_values = quantised_operands(x, w, gate_up=form is not None)
            got = grouped_gemm(xq, wq, offsets, expert_rows=rows, row_block=layout.row_block, tile=variant["name"],
                               x_scale=x_scale, w_scale=pairs, **form_arguments(form))
            if form is not None:
                got = got[0].float() * got[1].t().repeat_interleave(128, 1)
            real, want = layout.real_rows(), oracle(x_values, w_values, layout, form, None)
            assert relative_error(got[real], want[real]) <= (3e-3 if form is None else 0.035), variant


def hooked(layout, x, w, arrived, want, finished, record, timeout_ns):
    offsets, rows = layout.tensors()
    out = torch.full((layout.num_slots, w.shape[1]), torch.nan, dtype=torch.bfloat16, device=x.device)
    plan = gemm.make_plan(x.dtype, offsets, rows, num_slots=layout.num_slots, columns=w.shape[1], row_block=128, activation=False,
                          tile="128x256_s4_c2")
    gemm.launch(plan, x, w, out, hooks={"gate_arrived": arrived.data_ptr(), "gate_want": want.data_ptr(),
                                        "gate_record": record.data_ptr(), "push_finished": finished.data_ptr(),
                                        "gate_timeout_ns": timeout_ns},
                num_blocks=gemm.num_sms(x.device) - 8)
    return out


def counters(layout, *values):
    return [torch.full((max(layout.num_slots // 128, 8),), value, dtype=torch.int32, device=layout.device) for value in values]


def test_gate_waits_for_late_rows_and_push_counts_tiles(hopper):
    """Rows and their counters come 50 ms after the launch, on another stream: an early read would see NaN."""
    layout = Layout(COUNTS, 128, hopper)
    arrived, want, finished, record = counters(layout, 3, 7, 100, 0)
    real_x = random_rows(layout, 512, torch.Generator(hopper).manual_seed(2)).bfloat16()
    x = torch.full_like(real_x, torch.nan)
    w = torch.randn(len(COUNTS), 768, 512, device=hopper).bfloat16()
    side, main = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(side):  # loads every kernel before anything waits: loading one may wait for the GPU to be idle
        torch.cuda._sleep(1000)
        x.copy_(x.clone())
        arrived.fill_(3)
    torch.cuda.synchronize()
    with torch.cuda.stream(main):
        hooked(layout, x, w, want, want, finished, record, SECOND_NS)
    torch.cuda.synchronize()
    finished.fill_(100)
    torch.cuda.synchronize()
    with torch.cuda.stream(main):
        out = hooked(layout, x, w, arrived, want, finished, record, 10 * SECOND_NS)
    with torch.cuda.stream(side):
        torch.cuda._sleep(100_000_000)
        x.copy_(real_x)
        arrived.fill_(7)
    torch.cuda.synchronize()
    real, expected = layout.real_rows(), oracle(real_x, w, layout, None, None)
    assert relative_error(out[real], expected[real]) <= 2.5e-3
    assert (finished[: layout.num_slots // 128] == 103).all(), "each of the 3 column blocks counts once"
    assert record[0] == 0


def test_gate_gives_up_and_says_who_waited(hopper):
    layout = Layout((128, 128), 128, hopper)
    arrived, want, finished, record = counters(layout, 7, 7, 0, 0)
    arrived[1] = 6
    x, w = torch.zeros(256, 512, dtype=torch.bfloat16, device=hopper), torch.zeros(2, 256, 512, dtype=torch.bfloat16, device=hopper)
    hooked(layout, x, w, arrived, want, finished, record, SECOND_NS // 10)
    torch.cuda.synchronize()  # the context lives
    timed_out, _, row_block, seen, wanted = record[:5].tolist()
    assert (timed_out, row_block, seen, wanted) == (1, 1, 6, 7)
