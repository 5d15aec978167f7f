"""The account of a fused call, from times that can be added by hand."""

from __future__ import annotations

import math

import pytest

from moe_tk.bench.attribution import Times, account, mover_counts

TIMES = Times(fused=100.0, open=10.0, open_gather=70.0, gemm1=50.0, gemm2=25.0, cleared=14.0, pull=40.0, communicate=54.0,
              plain1=46.0, plain2=23.0)


def test_the_parts_add_up():
    found = account(TIMES)
    assert found["compute_us"] == 75 and found["communicate_us"] == 50  # 54 less the 4 of clearing
    assert found["exposed_us"] == 25 == found["exposed_front_us"] + found["exposed_back_us"]
    assert found["exposed_front_us"] == 20
    assert found["pull_us"] == 26 and found["combine_us"] == 14
    assert found["sm_tax_us"] == 6 and found["sm_tax"] == pytest.approx(75 / 69 - 1, abs=1e-3)


def test_overlap_and_interference_as_the_design_defines_them():
    found = account(TIMES)
    assert found["overlap"] == (75 + 50 - 100) / 50
    assert found["interference"] == pytest.approx((100 - 10) / 75)
    assert found["ceiling"] == pytest.approx(125 / 75, abs=1e-3)


def test_without_the_plain_gemm_there_is_no_tax():
    found = account(Times(**{**TIMES.__dict__, "plain1": math.nan}))
    assert "sm_tax_us" not in found and "plain_gemm1_us" not in found and found["overlap"] == 0.5


def test_mover_counts_go_up_to_all():
    assert mover_counts(132) == [1, 2, 4, 8, 16, 32, 64, 128, 132]
    assert mover_counts(16) == [1, 2, 4, 8, 16]
