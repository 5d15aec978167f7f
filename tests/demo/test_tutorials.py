"""The tutorials run as a reader runs them, and say what they promise."""

from __future__ import annotations

import pytest
from demo_helpers import REPO, run_python

from moe_tk.demo.start import build_module


@pytest.fixture(scope="module")
def first_tutorial():
    build_module()  # compiled before the time limit counts
    return run_python(str(REPO / "tutorials" / "01_follow_one_token.py"))


def test_first_tutorial_ends_in_its_assert(first_tutorial):
    assert first_tutorial.returncode == 0, first_tutorial.stderr
    assert first_tutorial.stdout.strip().endswith("All 7 tokens have exactly the result that the definition gives.")


def test_first_tutorial_shows_both_partial_rows_and_their_sum(first_tutorial):
    lines = [" ".join(line.split()) for line in first_tutorial.stdout.splitlines()]
    assert "10 + 7.5 17.5" in lines and "what the layer returned 17.5" in lines
    assert lines.count("---- on rank 0 ----") == lines.count("---- on rank 1 ----") == 1


def test_importing_a_tutorial_runs_nothing():
    done = run_python("-c", "import runpy; runpy.run_path('tutorials/01_follow_one_token.py', run_name='read')")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
