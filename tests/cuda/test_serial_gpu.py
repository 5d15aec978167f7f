"""The serial pattern and the choice of a pattern on real GPUs, as test_layer_gpu.py does for the fused one."""

from __future__ import annotations

import pytest

from tests.cuda.ranks import run_ranks
from tests.cuda.test_layer_gpu import FEW, HOPPERS, WORLDS

pair = [pytest.mark.multi_gpu, pytest.mark.skipif(HOPPERS < 2, reason=FEW)]


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("check", ["tables", "against_reference,every_tile", "one_stage_at_a_time,auto_follows_its_plan", "graphs"])
def test_check_on_every_rank(check, world):
    run_ranks(",".join(f"checks_serial:{name}" for name in check.split(",")), world=world)


@pytest.mark.parametrize("check", [pytest.param(name, marks=pair) for name in (
    "mixed_patterns", "back_to_back", "refusals", "late_rank", "missing_rank")])
def test_ranks_that_differ(check):
    run_ranks(f"checks_serial:{check}")


@pytest.mark.multi_gpu
@pytest.mark.skipif(HOPPERS < 2, reason=FEW)
def test_krn_11_killed_rank_is_lost_within_a_second():
    assert "survived" in run_ranks("checks_serial:dead_rank", killed=(1,))
