"""The serial pattern and the choice of a pattern on real GPUs: each test runs functions of tests/cuda/checks_serial.py or, in e4m3,
of checks_serial_fp8.py."""

from __future__ import annotations

import pytest
from backends import cuda, needs

from tests.cuda.ranks import run_check

WORLDS = [pytest.param(world, marks=needs(world)) for world in (1, 2)]


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("check", ["tables", "against_reference", "every_tile", "one_stage_at_a_time", "auto_follows_its_plan",
                                   "graphs"])
def test_check_on_every_rank(run_ranks, check, world):
    run_ranks(world, run_check, f"checks_serial:{check}", backend="cuda")


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("check", ["placed_rows", "against_reference", "every_tile", "one_stage_at_a_time", "given_scales",
                                   "graphs"])
def test_e4m3_on_every_rank(run_ranks, check, world):
    run_ranks(world, run_check, f"checks_serial_fp8:{check}", backend="cuda")


@pytest.mark.parametrize("backend", [cuda(world=2)])
@pytest.mark.parametrize("check", ["mixed_patterns", "back_to_back", "refusals"])
def test_e4m3_ranks_that_differ(run_ranks, check, backend):
    run_ranks(2, run_check, f"checks_serial_fp8:{check}", backend=backend)


@pytest.mark.parametrize("backend", [cuda(world=2)])
@pytest.mark.parametrize("check", ["mixed_patterns", "back_to_back", "refusals", "late_rank", "missing_rank"])
def test_ranks_that_differ(run_ranks, check, backend):
    run_ranks(2, run_check, f"checks_serial:{check}", backend=backend)


@pytest.mark.parametrize("backend", [cuda(world=2)])
def test_krn_11_killed_rank_is_lost_within_a_second(pools, backend):
    survivor, killed = pools.fresh(2, run_check, "checks_serial:dead_rank", backend=backend)
    assert survivor.error is None, survivor.error
    assert killed.exit_code == -9
