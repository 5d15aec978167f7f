"""What benchmarks/run_layer_h200.sh runs: with a python that only notes its arguments, which the command must then accept."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from moe_tk.bench import routings
from moe_tk.bench.options import Options, parse_options
from moe_tk.cli import bench_layer

ROOT = Path(__file__).parents[2]
COMMAND = ["-m", "moe_tk", "bench", "layer"]
pytestmark = pytest.mark.skipif(shutil.which("timeout") is None or shutil.which("bash") is None, reason="needs bash and timeout")


@pytest.fixture
def script(tmp_path, monkeypatch):
    """script(PART..., NAME=VALUE...): (status, the options of each command that the script has run, what it printed)."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)  # the commands are for GPUs; none is run
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\n{ printf "%s\\n" "$@"; echo; } >>"$NOTES"\n[ -z "$NAP" ] || sleep "$NAP"\nexit "${STATUS:-0}"\n')
    python.chmod(0o755)
    notes = tmp_path / "notes"

    def run(*parts: str, script: str = "run_layer_h200.sh", **environment: str) -> tuple[int, list[Options], str]:
        notes.write_text("")
        done = subprocess.run(
            ["bash", f"benchmarks/{script}", str(tmp_path / "out"), *parts], cwd=ROOT, capture_output=True, text=True, timeout=60,
            env={**os.environ, "PYTHON": str(python), "NOTES": str(notes), **environment})
        commands = [note.splitlines() for note in notes.read_text().split("\n\n") if note.strip()]
        assert all(words[:4] == COMMAND for words in commands)
        return done.returncode, [accepted(words[4:]) for words in commands], done.stdout + done.stderr

    return run


def accepted(words: list[str]) -> Options:
    parser = argparse.ArgumentParser()
    bench_layer.add_arguments(parser)
    return parse_options(parser.parse_args(words))


def test_by_default_it_runs_the_table_and_what_is_inside(script):
    status, (table, inside), _ = script()
    assert status == 0 and table.against == ("torch", "triton") and not table.attribute and table.plot_path is not None
    assert inside.attribute and inside.sweep == "comm-sms" and inside.tokens == (64, 512, 2048) and inside.dtypes == ("bf16",)
    assert inside.patterns == ("two_kernel",) and inside.shapes[0].name == "qwen3-30b-a3b"


def test_routings_fit_their_shapes_and_stand_beside_balanced(script, tmp_path):
    np.save(tmp_path / "own.npy", np.arange(64, dtype=np.int32).reshape(8, 8) % 128)
    np.savez(tmp_path / "two.npz", layer3=np.arange(12, dtype=np.int32).reshape(6, 2) % 8)
    files = f"{tmp_path}/own.npy:qwen3 {tmp_path}/two.npz#layer3:256,128,8,2"
    status, found, _ = script("routings", ROUTING_FILES=files)
    assert status == 0 and len(found) == 5 and len({each.json_path for each in found}) == 5
    for each in found:
        assert each.routings[0] == "balanced" and len(each.routings) > 1 and each.modes == ("ep", "tp") and each.against == ()
        assert each.patterns == ("two_kernel", "serial", "auto") and each.tokens == (512, 2048)
        for shape in each.shapes:
            for routing in each.routings:
                routings.make(routing, shape, tokens=4, world=2)  # raises when it does not fit
    assert {"uniform", "zipf"} <= set(found[0].routings) and [shape.name for shape in found[0].shapes][1] == "mixtral-8x7b"
    assert [each.json_path.name for each in found[3:]] == ["layer_routings_own_qwen3.json", "layer_routings_two_256x128x8x2.json"]


def test_a_failure_is_in_the_status_and_the_rest_still_runs(script):
    status, found, said = script("table", "inside", STATUS="3")
    assert status == 1 and len(found) == 2 and said.count("status 3: --shape") == 2
    status, found, said = script("tables")
    assert status == 2 and not found and "no part tables: wanted table, inside, routings" in said


def test_the_limit_is_of_all_routings_together(script):
    status, found, said = script("routings", ROUTINGS_LIMIT_S="2", NAP="30")
    assert status == 1 and len(found) == 1 and said.count("status 124: --shape") == 3


def test_run_all_separates_them(script, tmp_path):
    status, (table, inside, synthetic, *traces), _ = script("bench", "attribute", "routings", script="run_all_h200.sh")
    assert status == 0 and table.against and inside.attribute and "zipf" in synthetic.routings and len(traces) == 2
    assert [line.partition(":")[0] for line in (tmp_path / "out" / "parts.log").read_text().splitlines()] == [
        "bench", "attribute", "routings"]
