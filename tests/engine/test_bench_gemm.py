"""`moe_tk bench gemm` as far as it goes without a GPU: its refusals, its lines, and that a failed line costs only itself."""

from __future__ import annotations

import argparse

import pytest
import torch

from moe_tk.cli import bench_gemm
from moe_tk.errors import ArgumentError

LINE = {"case": "seed gemm1", "dtype": "bf16", "tokens": 64, "rows": 520, "n": 6144, "k": 4096, "tile": "64x128_s4_p2_c1",
        "us": {"moe_tk": 400.0, "torch": 600.0}, "tflops": 65.4, "weights_gbs": 4026.0, "roofline": 0.92, "clock_mhz": 1980,
        "power_w": 400, "power_limited": True}


def test_first_slots_are_padded_and_end_with_the_number_of_slots():
    assert bench_gemm.starts([0, 1, 64, 65], 64) == [0, 0, 64, 128, 256]


def test_a_line_says_rates_and_ratio():
    text = bench_gemm.format_line(LINE)
    for part in ("65 TFLOP/s", "4026 GB/s", "92% of roofline", "x1.50 of torch", "power-limited"):
        assert part in text
    assert "of torch" not in bench_gemm.format_line(LINE | {"us": {"moe_tk": 400.0}})


def test_a_failed_line_is_recorded_and_said():
    def wrong() -> dict:
        raise ArgumentError("expert 3: relative error 0.5 against float32; a wrong kernel is not timed")

    line = bench_gemm.attempt(wrong)
    assert "expert 3" in line["failed"] and bench_gemm.format_line(line) == line["failed"]
    assert bench_gemm.attempt(lambda: LINE) is LINE


def test_missing_tools_leave_gaps_not_errors():
    assert bench_gemm.output_of("no-such-program-here") == ""
    assert set(bench_gemm.read_clocks()) == {"clock_mhz", "power_w", "power_limited"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_without_a_gpu_it_says_what_it_needs():
    with pytest.raises(ArgumentError, match="compute capability 9.0"):
        bench_gemm.run(argparse.Namespace())
