"""docs/doctor.md lists exactly the ids that the code can say, each with an example that is true."""

from __future__ import annotations

import re
from pathlib import Path

import make_reason_page
import pytest
import reason_examples

from moe_tk.topology.finding_table import KINDS
from moe_tk.topology.reasons import REASONS, fill

ROOT = Path(__file__).parents[2]


def test_the_page_lists_exactly_the_ids_of_the_code():
    listed = re.findall(r"^#### `([\w-]+)`$", make_reason_page.PAGE.read_text(), re.MULTILINE)
    assert len(listed) == len(set(listed))
    assert set(listed) == set(REASONS) | set(KINDS)


def test_the_page_is_what_the_code_says():
    text = make_reason_page.PAGE.read_text()
    assert make_reason_page.page_with(text) == text, "run: python tests/doctor/make_reason_page.py"


@pytest.mark.parametrize("reason_id", REASONS)
def test_every_example_fulfils_its_condition(reason_id):
    inputs = reason_examples.REASONS[reason_id]
    assert REASONS[reason_id].holds(inputs)
    for template in (REASONS[reason_id].says, REASONS[reason_id].change):
        assert "unknown" not in fill(template, inputs)


@pytest.mark.parametrize("kind_id", KINDS)
def test_every_finding_example_is_filled_in(kind_id):
    inputs = reason_examples.FINDINGS[kind_id]
    for template in (KINDS[kind_id].says, KINDS[kind_id].fix):
        filled = fill(template, inputs)
        assert "{" not in filled and (" unknown " not in filled or "unknown" in template)


def test_every_id_used_in_the_code_is_in_the_table():
    used = set()
    for path in (ROOT / "moe_tk").rglob("*.py"):
        used |= set(re.findall(r'(?:finding|Problem)\(\s*"([\w-]+)"', path.read_text()))
    assert used and used <= set(KINDS)
    unreachable = set(KINDS) - used - {"nvml-binding-missing", "nvml-library-missing", "nvml-driver-not-loaded",
                                       "nvml-version-mismatch", "nvml-failed"}  # states of NVML, passed on by name
    assert unreachable == set()


def test_every_doctor_entry_of_the_bug_log_has_a_test():
    """Ids of known failures that concern the doctor; each must be named by a test."""
    ids = [f"doc_{n:02d}" for n in (1, 2, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 17, 18, 19, 20, 21, 22, 23, 24, 25)]
    ids += ["bld_04", "bld_05", "bld_15", "sym_04"]
    tests = "\n".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    assert [name for name in ids if f"def test_{name}_" not in tests] == []


def test_picture_is_there():
    page = make_reason_page.PAGE.read_text()
    pictures = re.findall(r"!\[[^]]*\]\(([^)]+)\)", page)
    assert pictures and all((make_reason_page.PAGE.parent / picture).is_file() for picture in pictures)
