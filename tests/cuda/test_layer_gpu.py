"""The layer over NVLink on real GPUs: each test runs a function of tests/cuda/checks.py or company.py on every rank."""

from __future__ import annotations

import pytest
from backends import cuda, needs

from tests.cuda.ranks import run_check

WORLDS = [pytest.param(world, marks=needs(world)) for world in (1, 2)]


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("check", ["tables", "layer_against_reference", "back_to_back", "graphs",
                                   "checks_variants:bf16", "trace_checks:traced_layer"])
def test_check_on_every_rank(run_ranks, check, world):
    run_ranks(world, run_check, check, backend="cuda")


@pytest.mark.parametrize("backend", [cuda(world=2)])
def test_sym_04_num_07_streams_and_devices(run_ranks, backend):
    run_ranks(2, run_check, "streams_and_devices", backend=backend)


@pytest.mark.parametrize("backend", [cuda(world=2)])
@pytest.mark.parametrize("check", ["refusals", "late_rank", "missing_rank"])
def test_ranks_that_differ(run_ranks, check, backend):
    run_ranks(2, run_check, check, backend=backend)


@pytest.mark.parametrize("backend", [cuda(world=2)])
@pytest.mark.parametrize("check", ["dead_rank", "company:killed_in_flight"])
def test_krn_11_killed_rank_is_lost_within_a_second(pools, check, backend):
    survivor, killed = pools.fresh(2, run_check, check, backend=backend)
    assert survivor.error is None, survivor.error
    assert killed.exit_code == -9


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("others", ["matrix_products", "sleepers"])
def test_krn_03_other_streams_hold_multiprocessors(run_ranks, others, world):
    run_ranks(world, run_check, f"company:beside_{others}", backend="cuda")


@pytest.mark.parametrize("world", WORLDS)
def test_grf_05_the_first_call_is_inside_a_capture(run_ranks, world):
    run_ranks(world, run_check, "company:first_call_in_a_capture", backend="cuda")


@pytest.mark.parametrize("world", WORLDS)
def test_grf_06_another_mode_between_capture_and_replay(run_ranks, world):
    run_ranks(world, run_check, "company:another_mode_after_the_capture", backend="cuda")


@pytest.mark.parametrize("world", WORLDS)
def test_sym_01_memory_of_an_allocator_that_cannot_export(run_ranks, world):
    run_ranks(world, run_check, "company:expandable_segments", backend="cuda")


@pytest.mark.parametrize("world", WORLDS)
def test_layers_of_several_groups_and_geometries_in_turn(run_ranks, world):
    run_ranks(world, run_check, "company:several_groups_and_geometries", backend="cuda")
