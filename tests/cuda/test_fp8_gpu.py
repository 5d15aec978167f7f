"""The e4m3 layer over NVLink on real GPUs: each test runs a function of tests/cuda/checks_fp8.py on every rank."""

from __future__ import annotations

import pytest
from backends import cuda, needs

from tests.cuda.ranks import run_check

WORLDS = [pytest.param(world, marks=needs(world)) for world in (1, 2)]


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("check", ["sent_rows", "layer_against_reference", "given_scales", "back_to_back", "graphs"])
def test_check_on_every_rank(run_ranks, check, world):
    run_ranks(world, run_check, f"checks_fp8:{check}", backend="cuda")


@pytest.mark.parametrize("world", WORLDS)
def test_every_pair_of_gemms(run_ranks, world):
    run_ranks(world, run_check, "checks_variants:e4m3", backend="cuda")


@pytest.mark.parametrize("backend", [cuda(world=2)])
def test_a_refused_call_is_told_to_the_others(run_ranks, backend):
    run_ranks(2, run_check, "checks_fp8:refusals", backend=backend)
