"""moe_tk.ops over NVLink on real GPUs: each test runs a function of tests/cuda/checks_ops.py, or in e4m3 of checks_ops_fp8.py or
checks_dense_fp8.py, on every rank."""

from __future__ import annotations

import pytest
from backends import cuda, needs

from tests.cuda.ranks import run_check

WORLDS = [pytest.param(world, marks=needs(world)) for world in (1, 2)]


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("check", ["dense", "dense_back_to_back", "routed", "routed_back_to_back", "graphs", "torch_ops"])
def test_ops_on_every_rank(run_ranks, check, world):
    run_ranks(world, run_check, f"checks_ops:{check}", backend="cuda")


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("check", ["routed", "like_the_layer", "back_to_back", "graphs", "torch_ops"])
def test_e4m3_ops_on_every_rank(run_ranks, check, world):
    run_ranks(world, run_check, f"checks_ops_fp8:{check}", backend="cuda")


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("check", ["dense", "back_to_back"])
def test_e4m3_dense_ops_on_every_rank(run_ranks, check, world):
    run_ranks(world, run_check, f"checks_dense_fp8:{check}", backend="cuda")


@pytest.mark.parametrize("backend", [cuda(world=2)])
@pytest.mark.parametrize("checks", ["checks_ops_fp8", "checks_dense_fp8"])
def test_e4m3_ops_of_ranks_that_differ(run_ranks, checks, backend):
    run_ranks(2, run_check, f"{checks}:refusals", backend=backend)


@pytest.mark.parametrize("backend", [cuda(world=2)])
@pytest.mark.parametrize("check", ["refusals", "missing_rank", "told_rank"])
def test_ops_of_ranks_that_differ(run_ranks, check, backend):
    run_ranks(2, run_check, f"checks_ops:{check}", backend=backend)
