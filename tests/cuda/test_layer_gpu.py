"""The layer over NVLink on real GPUs: each test starts one process per GPU and runs a check of tests/cuda/checks.py there."""

from __future__ import annotations

import pytest
import torch

from tests.cuda.ranks import run_ranks

DEVICES = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
HOPPERS = sum(torch.cuda.get_device_capability(index) == (9, 0) for index in DEVICES)
FEW = f"needs two GPUs of compute capability 9.0, found {HOPPERS}"
two_gpus = [pytest.mark.multi_gpu, pytest.mark.skipif(HOPPERS < 2, reason=FEW)]
one_gpu = [pytest.mark.gpu, pytest.mark.skipif(HOPPERS < 1, reason="needs a GPU of compute capability 9.0")]
WORLDS = [pytest.param(1, marks=one_gpu), pytest.param(2, marks=two_gpus)]


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("check", ["tables", "layer_against_reference", "back_to_back", "graphs", "streams_and_devices",
                                   "traced_layer"])
def test_check_on_every_rank(check, world):
    if world == 1 and check == "streams_and_devices":
        pytest.skip("needs a second device to be the current one")
    run_ranks(check, world=world)


@pytest.mark.multi_gpu
@pytest.mark.skipif(HOPPERS < 2, reason=FEW)
@pytest.mark.parametrize("check", ["refusals", "late_rank", "missing_rank"])
def test_ranks_that_differ(check):
    run_ranks(check)


@pytest.mark.multi_gpu
@pytest.mark.skipif(HOPPERS < 2, reason=FEW)
def test_krn_11_killed_rank_is_lost_within_a_second():
    assert "survived" in run_ranks("dead_rank", killed=(1,))
