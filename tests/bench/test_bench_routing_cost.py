"""What routing costs, from lines whose ratios can be worked out by hand."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from bench_helpers import line, options
from rich.console import Console

from moe_tk.bench.export import to_json
from moe_tk.bench.report import show
from moe_tk.bench.routing_cost import with_routing_costs


def of(routing, floor, bound, times, **changes):
    """A line with the times of ours and of one rival, which has no cost."""
    contenders = [{"name": name, "ours": name != "torch", "against": name == "torch", "state": "ok" if us else "failed",
                   "why": None, "error": 0.0, "notes": [], "us": {"graph": {"median": us}} if us else {}}
                  for name, us in times.items()]
    return line(routing=routing, floor={"us": floor, "bound": bound}, contenders=contenders, **changes)


EVEN = of("balanced", 100.0, "weights", {"two_kernel": 150.0, "serial": 200.0, "torch": 300.0})
SKEWED = of("zipf", 200.0, "flops", {"two_kernel": 324.0, "serial": 380.0, "torch": 900.0})


@pytest.mark.parametrize("lines", [[EVEN, SKEWED], [SKEWED, EVEN]])
def test_the_ratios_to_the_floors_are_compared_in_either_order(lines):
    found = {each["routing"]: each for each in with_routing_costs(lines)}
    assert found["zipf"]["routing_cost"] == {  # 324 / 200 over 150 / 100, 380 / 200 over 200 / 100
        "patterns": {"two_kernel": 1.08, "serial": 0.95}, "bound": "flops", "balanced_bound": "weights", "balanced_floor_us": 100.0}
    assert "routing_cost" not in found["balanced"] and [each["routing"] for each in with_routing_costs(lines)] == [
        each["routing"] for each in lines]
    assert "routing_cost" not in SKEWED


@pytest.mark.parametrize("other", [{"tokens": 512}, {"mode": "tp"}, {"dtype": "e4m3"}, {"shape": "seed"}])
def test_only_a_balanced_line_of_the_same_place_counts(other):
    assert not any("routing_cost" in each for each in with_routing_costs([{**EVEN, **other}, SKEWED]))


def test_a_pattern_without_times_in_both_lines_has_no_cost():
    (_, found) = with_routing_costs([of("balanced", 100.0, "weights", {"two_kernel": 150.0, "serial": None}), SKEWED])
    assert found["routing_cost"]["patterns"] == {"two_kernel": 1.08}
    failed = {**SKEWED, "contenders": [], "why": "does not fit"}
    del failed["floor"]
    assert not any("routing_cost" in each for each in with_routing_costs([EVEN, failed]))
    assert not any("routing_cost" in each for each in with_routing_costs([EVEN, of("zipf", 0.0, "weights", {"two_kernel": 1.0})]))


def shown(lines, backend="cuda"):
    console = Console(file=io.StringIO(), width=140)
    show(console, lines, backend=backend, how="Medians.")
    return console.file.getvalue()


def test_the_table_names_both_floors_and_what_bounds_them():
    text = shown([EVEN, SKEWED])
    row = next(row for row in text.splitlines() if row.startswith("64, zipf"))
    assert row.split() == ["64,", "zipf", "200", "f", "100", "w", "1.08", "0.95"]
    assert "What routing costs" in text and "different things bound" in text
    same = of("zipf", 200.0, "weights", {"two_kernel": 324.0})
    assert "different things bound" not in shown([EVEN, same]) and "What routing costs" not in shown([SKEWED])


def test_on_the_cpu_back_end_there_is_no_floor_to_compare_with():
    assert "What routing costs" not in shown([EVEN, SKEWED], backend="cpu")
    record = to_json(options(), {"command": ""}, [EVEN, SKEWED], 1.0)
    assert not any("routing_cost" in each for each in record["lines"])


def test_json_has_the_cost_in_its_line():
    record = to_json(replace(options(), backend="cuda"), {"command": ""}, [EVEN, SKEWED], 1.0)
    costs = [each.get("routing_cost", {}).get("patterns") for each in record["lines"]]
    assert costs == [None, {"two_kernel": 1.08, "serial": 0.95}]
