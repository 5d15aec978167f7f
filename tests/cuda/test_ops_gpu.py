"""moe_tk.ops over NVLink on real GPUs: each test starts one process per GPU and runs checks of tests/cuda/checks_ops.py there."""

from __future__ import annotations

import pytest

from tests.cuda.ranks import run_ranks
from tests.cuda.test_layer_gpu import WORLDS, two_gpus


@pytest.mark.parametrize("world", WORLDS)
def test_ops_against_references(world):
    run_ranks("dense,routed,graphs,torch_ops", module="checks_ops", world=world)


@pytest.mark.parametrize("world", WORLDS)
def test_calls_without_a_wait_between_them(world):
    run_ranks("dense_back_to_back,routed_back_to_back", module="checks_ops", world=world)


@pytest.mark.parametrize("check", [pytest.param(name, marks=two_gpus) for name in ("refusals", "missing_rank")])
def test_ranks_that_differ(check):
    run_ranks(check, module="checks_ops")
