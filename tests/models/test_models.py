"""Every model holds and every mutant is refuted, by Spin, here and now; and what is committed about them says the same.

KRN-05, KRN-06, KRN-08, KRN-10, KRN-11, GRF-01 and GRF-02 have mutants of their own: the BUGLOG column of docs/protocols.md.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import model_page as page
import pytest
import run_models
from model_checks import FOLDER, MODELS, Check, all_checks, parse_line, switches_of

ROOT = FOLDER.parents[1]
CHECKS = all_checks()
ANEW = "regenerate: python tests/models/run_models.py --write"
MAPPING = (FOLDER / "README.md").read_text()
MISSING = run_models.missing_tools()
needs_spin = pytest.mark.skipif(bool(MISSING), reason=f"model checking needs {', '.join(MISSING)} (apt-get install spin gcc)")


@pytest.fixture(scope="session")
def results() -> dict[str, run_models.Result]:
    """All checks, made once and several at a time."""
    found = run_models.run_all(CHECKS, jobs=min(4, os.cpu_count() or 1))
    return {check.id: result for check, result in zip(CHECKS, found, strict=True)}


@pytest.fixture(scope="session")
def record() -> dict:
    return json.loads(page.RESULTS.read_text())


@needs_spin
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.id)
def test_krn_05_krn_06_models_hold_and_mutants_are_refuted(check: Check, results):
    result = results[check.id]
    assert result.verdict == check.expected, f"{check.id}: seen {result.verdict}, wanted {check.expected}"
    assert result.states > 0
    if not check.is_mutant:
        assert result.ends, "some run of the model never ends"


@needs_spin
@pytest.mark.parametrize("model", MODELS)
def test_every_statement_of_a_model_is_reached(model, results):
    """A model that is stuck early would hold for no reason: some configuration comes to each of its statements."""
    holding = [results[check.id] for check in CHECKS if check.model == model and not check.is_mutant]
    assert holding
    assert not set.intersection(*(set(result.unreached) for result in holding))


@needs_spin
def test_committed_results_are_those_of_this_run(results, record):
    """Verdicts always, numbers of states when this is the Spin that counted them (a search that stops early depends on it)."""
    same_spin = run_models.versions()["spin"] == record["versions"]["spin"]
    for row in record["checks"]:
        result = results[f"{row['model']}/{row['name']}"]
        assert row["verdict"] == result.verdict
        if same_spin and row["expected"] == "holds":
            assert (row["states"], row["depth"]) == (result.states, result.depth), f"{row['model']}/{row['name']}: {ANEW}"


def test_committed_results_name_the_checks_of_the_models(record):
    keys = ("model", "name", "expected", "text", "buglog")
    assert [[row[key] for key in keys] for row in record["checks"]] == [[getattr(c, key) for key in keys] for c in CHECKS], ANEW
    assert record["models"] == MODELS


@pytest.mark.parametrize("name", page.PARTS)
def test_page_has_the_committed_results(name, record):
    found = page.marked(name, page.PAGE.read_text())
    assert found.group(2) == page.PARTS[name](record), ANEW


@pytest.mark.parametrize("model", MODELS)
def test_every_switch_is_used_and_every_mutant_switches_something(model):
    """A mutant is one #define: it must stand in an #if of its model, and every name in an #if must be given by some check."""
    checks = [check for check in CHECKS if check.model == model]
    given = {flag.removeprefix("-D").split("=")[0] for check in checks for flag in check.flags}
    text = (FOLDER / f"{model}.pml").read_text()
    defined = set(re.findall(r"^\s*#\s*define (\w+)", text, re.MULTILINE))
    switches = switches_of(model)
    assert {check.name for check in checks if check.is_mutant} <= switches
    assert switches <= given | defined
    assert len({check.id for check in checks}) == len(checks)


def test_page_names_only_mutants_that_exist():
    names = {name for check in CHECKS for name in (check.name, check.model)}
    text = page.PAGE.read_text()
    for model, mutant in re.findall(r"`(\w+)/([A-Z][A-Z_0-9]+)`", text):
        assert f"{model}/{mutant}" in {check.id for check in CHECKS}, f"{page.PAGE.name} speaks of {model}/{mutant}"
    assert "ELECTED_TOO_EARLY" in names


def test_mapping_names_every_model_and_mutant():
    for check in CHECKS:
        if check.is_mutant:
            section = re.search(rf"^## {check.model}\b.*?(?=^## |\Z)", MAPPING, re.MULTILINE | re.DOTALL)
            assert section, f"README.md has no section {check.model}"
            assert f"`{check.name}`" in section[0], f"README.md, section {check.model}, does not map {check.name}"


def places(text: str) -> list[tuple[str, str]]:
    """What a page refers to as `file: name`, or as `file: name, name`."""
    found = re.findall(r"`((?:tk_kernels|moe_tk)/[\w/.]+): ([\w:, ]+)`", text)
    return [(file, name.strip().split("::")[-1]) for file, names in found for name in names.split(",")]


@pytest.mark.parametrize("source", ["tests/models/README.md", "docs/protocols.md"])
def test_mapped_code_exists(source):
    """Whoever renames or removes what a model stands for has to look at the model."""
    found = places((ROOT / source).read_text())
    assert len(found) > 20
    for file, name in found:
        path = Path(ROOT / file)
        assert path.exists(), f"{source}: {file} does not exist"
        assert re.search(rf"\b{name}\b", path.read_text()), f"{source}: {file} has no {name}"


@pytest.mark.parametrize("line", ["//@ holds", "//@ refuted NAME", "//@ refuted NAME maybe | text", "//@ holds name flag",
                                  "// holds name"])
def test_lines_that_are_no_checks_are_refused(line):
    with pytest.raises(ValueError, match="cannot read"):
        parse_line("slot", line)


@pytest.mark.parametrize(("status", "text", "verdict"), [
    (0, "Full statespace search\nerrors: 0\n", "holds"),
    (0, "pan:1: assertion violated (x==1) (at depth 9)\nerrors: 1\n", "assertion"),
    (0, "pan:1: invalid end state (at depth 9)\nFull statespace search for:\n invalid end states +\nerrors: 1\n", "deadlock"),
    (0, "pan:1: non-progress cycle (at depth 9)\nFull statespace search for:\nerrors: 1\n", "cycle"),
    (0, "error: max search depth too small\nFull statespace search for:\n invalid end states +\nerrors: 0\n", "incomplete"),
    (1, "pan: out of memory\nerrors: 0\n", "incomplete"),
    (-1, "stopped after 60 s", "incomplete"),
])
def test_verdicts(status, text, verdict):
    """A search that was cut short is never a verdict."""
    assert run_models.verdict_of(status, text).split(":")[0] == verdict


@needs_spin
def test_a_broken_model_is_no_verdict():
    """A model that does not compile, or that names a mutant which is not in it, must not count as refuted."""
    assert run_models.run_check(Check("slot", "NO_SUCH_MUTANT", "assertion", (), "")).verdict == "holds"
    assert run_models.run_check(Check("broken", "x", "holds", (), "")).verdict.startswith("incomplete")


@needs_spin
@pytest.mark.parametrize("name", ["slot/SIGNAL_FIRST", "nvlink/PUBLISHES_AFTER_ABORT"])
def test_a_run_that_refutes_a_mutant_can_be_shown(name, capsys):
    assert run_models.show_trace(all_checks([name])[0]) == 0
    shown = capsys.readouterr().out
    assert "assertion violated" in shown and "proc" in shown


@needs_spin
def test_there_is_no_such_run_of_a_model_that_holds(capsys):
    assert run_models.show_trace(all_checks(["slot/three_calls"])[0]) == 1
    assert "no run that breaks a property" in capsys.readouterr().out
