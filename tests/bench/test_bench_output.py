"""Table, JSON and picture of given lines."""

from __future__ import annotations

import io
import json
import xml.dom.minidom

import pytest
from bench_helpers import line, options
from rich.console import Console

from moe_tk.bench.environment import commit, environment, gpu_state, output_of
from moe_tk.bench.export import SCHEMA, to_json, write_json
from moe_tk.bench.plot import axis, picture
from moe_tk.bench.report import show
from moe_tk.errors import MoETkError

ACCOUNT = {"fused_us": 200.0, "compute_us": 150.0, "communicate_us": 80.0, "exposed_us": 50.0, "exposed_front_us": 35.0,
           "exposed_back_us": 15.0, "overlap": 0.375, "interference": 1.13}


def shown(lines, backend="cuda"):
    console = Console(file=io.StringIO(), width=140)
    show(console, lines, backend=backend, how="Medians.")
    return console.file.getvalue()


def test_the_table_has_times_ratios_and_the_reasons_of_those_who_are_missing():
    text = shown([line(), line(tokens=512)])
    row = next(row for row in text.splitlines() if row.startswith("64 "))
    for part in ("132 w", "200", "272", "206", "failed", "1.52", "0.97"):
        assert part in row
    assert "serial: not available: no such pattern" in text and "deepgemm, T 64: failed: RuntimeError: no kernel" in text
    assert text.count("qwen3-30b-a3b  EP") == 1


def test_a_pattern_of_ours_that_the_others_are_compared_with_is_a_baseline():
    one = line()
    one["contenders"][1] |= {"against": True, "state": "ok", "us": {"graph": {"median": 190.0}}}
    assert "baseline" in shown([one]) and "baseline" not in shown([line()])


def test_the_account_and_the_sweep_are_shown_or_why_not():
    text = shown([line(attribution=ACCOUNT, sweep={"export_blocks": {"fused": {8: 900.0, 120: 200.0}}}),
                  line(tokens=512, attribution={"why": "no stages"})])
    assert "38 %" in text and "1.13" in text and "attribution at T 512: no stages" in text and "900" in text


def test_a_line_that_could_not_be_says_why():
    text = shown([{**{name: value for name, value in line().items() if name in (
        "shape", "hidden", "intermediate", "experts", "top_k", "mode", "dtype", "routing", "tokens", "world")},
        "why": "routing does not fit", "contenders": []}])
    assert "T 64: routing does not fit" in text


def test_json_has_environment_numbers_arguments_and_lines(tmp_path):
    own = tmp_path / "own" / "ids.npz"
    own.parent.mkdir()
    own.touch()
    found = options("--shape", "seed", "--tokens", "64", "--mode", "ep", "--json", str(tmp_path / "a.json"),
                    "--routing", f"{own}#ids")
    command = f"moe_tk bench layer --json {tmp_path / 'a.json'} --routing {own}#ids"
    record = to_json(found, environment() | {"command": command}, [line()], 12.34)
    assert str(tmp_path) not in json.dumps(record) and record["arguments"]["routings"] == ["ids.npz#ids"]
    assert record["environment"]["command"] == "moe_tk bench layer --json a.json --routing ids.npz#ids"
    write_json(tmp_path / "a.json", record)
    again = json.loads((tmp_path / "a.json").read_text())
    assert again["schema"] == SCHEMA and again["complete"] is True and again["seconds"] == 12.3
    assert {"commit", "torch", "cuda", "driver", "gpus", "nccl", "triton", "date", "command"} <= set(again["environment"])
    assert again["machine_numbers"] == {"hbm_tbs": 4.59, "bf16_tflops": 795.0, "fp8_tflops": 1458.0, "wire_gbs": 364.0}
    assert again["arguments"]["tokens"] == [64] and again["lines"][0]["contenders"][0]["us"]["graph"]["median"] == 200.0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.json", "own"]


def test_json_that_cannot_be_written_is_one_sentence(tmp_path):
    with pytest.raises(MoETkError, match="--json"):
        write_json(tmp_path / "no" / "a.json", {})


def test_the_commit_is_of_the_checkout_or_from_the_environment(monkeypatch):
    monkeypatch.setattr("moe_tk.bench.environment.output_of", lambda *command: "")
    monkeypatch.setenv("MOE_TK_COMMIT", "abc123")
    assert commit() == "abc123"
    monkeypatch.delenv("MOE_TK_COMMIT")
    assert commit() == "unknown"


def test_missing_tools_leave_gaps_not_errors():
    import torch

    assert output_of("no-such-program-here") == "" and gpu_state(torch.device("cpu")) == {}


def test_the_picture_has_a_panel_for_each_title_and_a_point_for_each_time():
    lines = [line(tokens=tokens, mode=mode) for mode in ("ep", "tp") for tokens in (64, 512, 2048)]
    svg = xml.dom.minidom.parseString(picture(lines))
    assert len(svg.getElementsByTagName("g")) == 2
    assert len(svg.getElementsByTagName("polyline")) == 2 * 4  # floor, ours, two rivals
    assert len(svg.getElementsByTagName("circle")) == 2 * 3 * 3
    texts = [node.firstChild.data for node in svg.getElementsByTagName("text")]
    assert {"floor", "two_kernel", "torch", "triton"} <= set(texts) and "deepgemm" not in texts


def test_the_picture_of_nothing_is_still_one():
    assert "<svg" in picture([]) and "<svg" in picture([line(tokens=64)])


def test_axes_are_logarithmic():
    place = axis(1.0, 100.0, 0.0, 10.0)
    assert [place(value) for value in (1, 10, 100)] == pytest.approx([0, 5, 10])
    assert axis(5.0, 5.0, 0.0, 10.0)(5.0) == 5.0
