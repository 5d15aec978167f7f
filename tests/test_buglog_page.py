"""docs/buglog.md against the tests: every test that it names exists, and every id in a test's name is on it."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).resolve().parent
PAGE = TESTS.parent / "docs" / "buglog.md"
ID = re.compile(r"(DOC|SYM|KRN|SCH|NUM|BLD|GRF|OPS)-(\d\d)")
UNTESTED = r"comes with|no GPU|there is no |there is none|no test (of its own )?yet|nothing to capture|on GPUs|two GPUs|no engine"
WANTED = {
    "DOC": (1, 2, *range(4, 16), *range(17, 26)), "SYM": (1, *range(3, 10), 11), "KRN": (*range(1, 18), 19, 21, 22, 23),
    "SCH": (1, 2, 3, *range(5, 13)), "NUM": range(1, 11), "BLD": (1, 2, *range(4, 9), *range(10, 17)),
    "GRF": (1, 2, 3, 5, 6), "OPS": (1, 3, 4, 5),
}


def rows() -> dict[str, list[str]]:
    """Cells of each row of the page's tables, by id."""
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    found = [row for row in cells if ID.fullmatch(row[0])]
    assert len({row[0] for row in found}) == len(found), "an id is on the page twice"
    return {row[0]: row for row in found}


def test_names() -> set[str]:
    """Names of all test functions of the project."""
    pattern = re.compile(r"^ *def (test_\w+)", re.M)
    return {name for path in TESTS.rglob("test_*.py") for name in pattern.findall(path.read_text())}


test_names.__test__ = False


def test_every_id_has_its_row():
    assert sorted(rows()) == sorted(f"{section}-{number:02}" for section, numbers in WANTED.items() for number in numbers)
    assert all(len(row) == 4 and all(row) for row in rows().values())


def test_every_test_that_is_named_exists():
    existing = test_names()
    for number, row in rows().items():
        missing = [name for name in re.findall(r"`(test_\w+)`", row[3]) if name not in existing]
        assert not missing, f"{number} names {missing}, which no file in tests/ defines"


def test_a_row_names_a_test_or_says_why_not():
    for number, row in rows().items():
        assert "`test_" in row[3] or re.search(UNTESTED, row[3]), f"{number}: {row[3]}"


def test_every_id_in_a_name_of_a_test_is_on_the_page():
    page = rows()
    for name in test_names():
        for section, number in re.findall(r"_(doc|sym|krn|sch|num|bld|grf|ops)_(\d\d)(?=_)", name):
            assert f"{section.upper()}-{number}" in page, f"{name} has an id that is not on the page"


def test_every_named_row_has_a_test_that_bears_its_id():
    """A row that is claimed as tested is found by its id on the command line, unless it is about what is not here."""
    for number, row in rows().items():
        if "`test_" in row[3] and not re.search(UNTESTED, row[3]):
            slug = number.lower().replace("-", "_")
            assert f"_{slug}_" in row[3], f"{number} names no test with {slug} in its name"
