"""The rank harness of the tests notices what it is there to notice, and goes on with new ranks afterwards."""

from __future__ import annotations

import time

import broken_jobs
import pytest
from ranks import RanksFailed, gone


@pytest.mark.parametrize("job, text", [
    (broken_jobs.keeps_a_layer, "left behind by"), (broken_jobs.raises, "ValueError: this rank is wrong"),
    (broken_jobs.dies, "rank 1: the process died"), (broken_jobs.hangs, "rank 0: did not end in time"),
])
def test_a_broken_job_is_reported_and_its_ranks_are_replaced(run_ranks, job, text):
    before = run_ranks(2, broken_jobs.process_id)
    assert run_ranks(2, broken_jobs.process_id) == before
    with pytest.raises(RanksFailed, match=text):
        run_ranks(2, job, limit_s=2.0 if job is broken_jobs.hangs else 60.0)
    assert all(gone(pid) for pid in before)
    assert not set(run_ranks(2, broken_jobs.process_id)) & set(before)


def test_a_rank_that_died_between_two_jobs_is_reported_and_replaced(run_ranks):
    before = run_ranks(2, broken_jobs.process_id)
    run_ranks(2, broken_jobs.dies_later)
    deadline = time.monotonic() + 10
    while not gone(before[1]):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    with pytest.raises(RanksFailed, match="rank 1: the process (had )?died"):
        run_ranks(2, broken_jobs.process_id)
    assert all(gone(pid) for pid in before)
    assert not set(run_ranks(2, broken_jobs.process_id)) & set(before)


def test_ranks_of_their_own_end_with_their_job(fresh_ranks):
    outcomes = fresh_ranks(2, broken_jobs.process_id)
    assert all(gone(outcome.value) for outcome in outcomes)
    assert [outcome.exit_code for outcome in fresh_ranks(2, broken_jobs.dies)] == [0, 3]
