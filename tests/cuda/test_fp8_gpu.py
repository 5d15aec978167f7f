"""The e4m3 layer over NVLink on real GPUs: each test starts one process per GPU and runs a check of checks_fp8.py there."""

from __future__ import annotations

import pytest

from tests.cuda.ranks import run_ranks
from tests.cuda.test_layer_gpu import WORLDS, two_gpus


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("check", ["sent_rows", "layer_against_reference", "given_scales", "back_to_back", "graphs"])
def test_check_on_every_rank(check, world):
    run_ranks(f"checks_fp8:{check}", world=world)


@pytest.mark.parametrize("world", [pytest.param(2, marks=two_gpus)])
def test_a_refused_call_is_told_to_the_others(world):
    run_ranks("checks_fp8:refusals", world=world)
