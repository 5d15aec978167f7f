"""Random fault schedules by seed: twenty here, two hundred in benchmarks/fault_schedules.py."""

from __future__ import annotations

import pytest
from fault_lab import play
from fault_scenarios import random_scenario


@pytest.mark.parametrize("seed", range(20))
def test_random_schedule(tmp_path, seed):
    """Each seed is a world, a pattern, a mode, a phase, a victim, a fault and a moment."""
    verdict = play(random_scenario(seed), tmp_path)
    assert verdict.problems == [], f"seed {seed}, {verdict.scenario}: " + "\n".join(verdict.problems)
