"""The account of a fused call, from times that can be added by hand."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from moe_tk.bench.attribution import OPEN_CLUSTER, Times, account, export_counts

TIMES = Times(fused=100.0, open=10.0, open_gather=70.0, gemm1=50.0, gemm2=25.0, cleared=14.0, communicate=54.0,
              plain1=46.0, plain2=23.0)


def test_the_parts_add_up():
    found = account(TIMES)
    assert found["compute_us"] == 75 and found["communicate_us"] == 50  # 54 less the 4 of clearing
    assert found["exposed_us"] == 25 == found["exposed_front_us"] + found["exposed_back_us"]
    assert found["exposed_front_us"] == 20
    assert found["combine_us"] == 40
    assert found["gather_tax_us"] == 4 and found["combine_tax_us"] == 2
    assert found["sm_tax_us"] == 6 and found["sm_tax"] == pytest.approx(75 / 69 - 1, abs=1e-3)


def test_overlap_and_interference_as_the_design_defines_them():
    found = account(TIMES)
    assert found["overlap"] == (75 + 50 - 100) / 50
    assert found["interference"] == pytest.approx((100 - 10) / 75)
    assert found["ceiling"] == pytest.approx(125 / 75, abs=1e-3)


def test_without_the_plain_gemm_there_is_no_tax():
    found = account(Times(**{**TIMES.__dict__, "plain1": math.nan}))
    assert not {"sm_tax_us", "gather_tax_us", "plain_gemm1_us"} & set(found) and found["overlap"] == 0.5


def test_blocks_that_send_are_whole_clusters_up_to_all_but_one():
    assert export_counts(132) == [8, 16, 32, 64, 120]
    assert export_counts(24) == [8, 16] and export_counts(8) == [8]
    text = (Path(__file__).resolve().parents[2] / "tk_kernels/nvlink/tables.cuh").read_text()
    assert re.search(rf"OPEN_CLUSTER = {OPEN_CLUSTER};", text)
