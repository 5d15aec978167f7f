"""Who comes when, and what is made of the samples."""

from __future__ import annotations

import time

import pytest

from moe_tk.bench.timing import CpuClock, Entry, slower_rank, summary, take_turns, turns


def test_every_round_has_everybody_once_and_begins_with_the_next():
    order = turns(["a", "b", "c"], 4)
    assert order == ["a", "b", "c", "b", "c", "a", "c", "a", "b", "a", "b", "c"]
    assert turns([], 3) == []


class FakeClock:
    """Counts up: the n-th sample takes n microseconds."""

    def __init__(self):
        self.order = []

    def sample(self, entry):
        entry.run()
        return float(len(self.order))


def test_samples_are_interleaved_and_the_first_round_only_warms_up():
    clock = FakeClock()
    entries = {name: Entry(lambda name=name: clock.order.append(name)) for name in ("ours", "rival")}
    samples = take_turns(clock, entries, 3)
    assert clock.order == ["ours", "rival", "rival", "ours", "ours", "rival", "rival", "ours"]
    assert samples == {"ours": [4.0, 5.0, 8.0], "rival": [3.0, 6.0, 7.0]}


def test_a_round_takes_as_long_as_its_slowest_rank():
    assert slower_rank([[1.0, 5.0, 2.0], [3.0, 4.0, 2.5]]) == [3.0, 5.0, 2.5]
    with pytest.raises(ValueError):
        slower_rank([[1.0], [1.0, 2.0]])


def test_summary():
    assert summary([4.0, 1.0, 3.0, 2.0, 5.0]) == {"median": 3.0, "min": 1.0, "max": 5.0, "quartiles": [2.0, 4.0], "rounds": 5}
    assert summary([7.0])["quartiles"] == [7.0, 7.0]


def test_the_wall_clock_counts_a_call_and_not_what_comes_before_it():
    met = []
    clock = CpuClock(lambda: met.append(1))
    us = clock.sample(Entry(lambda: time.sleep(0.02), calls=2, before=lambda: time.sleep(0.1)))
    assert 9_000 < us < 45_000 and met == [1]
    assert len(clock.steady(Entry(lambda: None), 3, 4)) == 4
