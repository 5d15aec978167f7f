"""docs/schedule.md says what the code says: its tables, its walk through them and its numbers are regenerated here."""

from __future__ import annotations

import re
from dataclasses import fields

import pytest
import torch

from moe_tk.schedule import Tables, check_tables

from . import page
from .interpreter import direct, interpret


@pytest.mark.parametrize("name", page.PARTS)
def test_page_equals_the_code(name):
    found = page.marked(name, page.PAGE.read_text())
    assert found.group(2) == page.PARTS[name](), "regenerate: PYTHONPATH=. python tests/schedule/page.py"


def test_the_example_is_a_right_schedule_and_gives_the_result():
    """The tables of the page, executed: every token's result, and the followed one's, are those of the definition."""
    ids, weights = torch.tensor(page.IDS), torch.tensor(page.WEIGHTS, dtype=torch.float64)
    for tables in page.example():
        check_tables(tables, ids)
    x = torch.full((8,), page.X, dtype=torch.float64)
    run = interpret(page.example(), weights, x, page.COLS)
    torch.testing.assert_close(run.result, direct(ids, weights, x, page.COUNTS, 4))
    assert page.example_walk().endswith(f"= {float(run.result[page.FOLLOWED]):g}.")


def test_what_the_page_says_about_the_example():
    """The sentences of "What else to see in the tables"."""
    first, second = page.example()
    assert second.expert_offsets.tolist().count(6) == 2 and 2 not in second.block_group.tolist()
    assert 5 in first.delivery_order.tolist() and 5 not in second.delivery_order.tolist()
    for tables in (first, second):
        assert 7 not in tables.delivery_order.tolist() and tables.slots[7].tolist() == [-1, -1]
    moved, ready = first.delivery_order.tolist(), first.job_order.tolist()
    assert moved.index(6) < moved.index(2) and ready.index(6) > ready.index(2)


def test_the_first_code_of_the_page_runs(capsys):
    code = re.search(r"```python\n(.*?)```", page.PAGE.read_text(), re.DOTALL)
    exec(compile(code.group(1), str(page.PAGE), "exec"), {})
    assert "segments=4" in capsys.readouterr().out


def test_every_table_is_on_the_page():
    text = page.PAGE.read_text()
    for field in fields(Tables):
        assert f"`{field.name}`" in text, field.name
