"""The whole command on the CPU back end, by itself and under torchrun; and what it says where it cannot run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

ROOT = Path(__file__).parents[2]
TINY = ("--backend", "cpu", "--shape", "64,64,6,2")


def command(*words: str, launcher: tuple[str, ...] = (), **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, *launcher, "-m", "moe_tk", "bench", "layer", *words], capture_output=True, text=True,
                          timeout=240, env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "120", **environment})


def test_a_tiny_shape_from_end_to_end(tmp_path):
    done = command(*TINY, "--tokens", "5,16", "--routing", "zipf", "--rounds", "2", "--calls", "1", "--against",
                   "torch,triton,deepgemm,flashinfer", "--sustained", "0.02", "--json", str(tmp_path / "a.json"),
                   "--plot", str(tmp_path / "a.svg"))
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads((tmp_path / "a.json").read_text())
    assert record["complete"] and [(line["mode"], line["tokens"]) for line in record["lines"]] == [
        ("ep", 5), ("ep", 16), ("tp", 5), ("tp", 16)]
    for line in record["lines"]:
        found = {contender["name"]: contender for contender in line["contenders"]}
        for name in ("two_kernel", "serial", "torch"):
            assert found[name]["state"] == "ok" and found[name]["us"]["eager"]["rounds"] == 2, found[name]
            assert found[name]["error"] < 0.01 and found[name]["us"]["sustained"]["median"] > 0
        assert {found[name]["state"] for name in ("triton", "deepgemm", "flashinfer")} == {"not available"}
        assert line["ours"]["us"] > 0 and line["to_rival"] > 0 and line["to_floor"] is None and line["world"] == 2
    assert "says nothing about gpus" in done.stdout.lower() and "starting 2 ranks" in done.stderr
    assert "<svg" in (tmp_path / "a.svg").read_text()


def test_under_torchrun(tmp_path):
    done = command(*TINY, "--tokens", "8", "--mode", "tp", "--rounds", "2", "--against", "torch,serial", "--json",
                   str(tmp_path / "a.json"), OMP_NUM_THREADS="1",
                   launcher=("-m", "torch.distributed.run", "--nproc-per-node", "2"))
    assert done.returncode == 0, done.stdout + done.stderr
    (line,) = json.loads((tmp_path / "a.json").read_text())["lines"]
    sides = [(contender["name"], contender["ours"], contender["against"]) for contender in line["contenders"]]
    assert sides == [("two_kernel", True, False), ("torch", False, True), ("serial", True, True)]
    assert line["ours"]["name"] == "two_kernel" and line["best_rival"]["us"] == min(
        contender["us"]["eager"]["median"] for contender in line["contenders"][1:])
    assert done.stdout.count("64x64-e6k2  TP") == 1  # one rank prints


def test_flashinfer_between_two_ranks(tmp_path):
    """The stand-in asserts what each rank gives it; the result of both together is checked as every rival's."""
    stand_in = os.pathsep.join((str(ROOT / "tests" / "bench" / "stand_in"), str(ROOT)))
    done = command(*TINY, "--tokens", "5,16", "--routing", "zipf", "--rounds", "2", "--calls", "1", "--pattern", "two_kernel",
                   "--against", "flashinfer", "--json", str(tmp_path / "a.json"), PYTHONPATH=stand_in)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = json.loads((tmp_path / "a.json").read_text())["lines"]
    assert [line["mode"] for line in lines] == ["ep", "ep", "tp", "tp"]
    for line in lines:
        rival = line["contenders"][1]
        assert rival["state"] == "ok" and rival["error"] < 0.01 and line["best_rival"]["name"] == "flashinfer", rival


def test_a_routing_that_does_not_fit_costs_its_line_only(tmp_path):
    np.save(tmp_path / "own.npy", np.zeros((4, 3), dtype=np.int32))
    done = command(*TINY, "--tokens", "4", "--mode", "ep", "--rounds", "1", "--against", "none", "--pattern", "two_kernel",
                   "--routing", "trace", "--routing", "uniform", "--routing", str(tmp_path / "own.npy"),
                   "--json", str(tmp_path / "a.json"))
    assert done.returncode == 0, done.stderr
    lines = json.loads((tmp_path / "a.json").read_text())["lines"]
    assert [line["routing"] for line in lines] == ["trace", "uniform", "own.npy"] and "'own.npy' is top 3" in lines[2]["why"]
    assert "wants top 2 of 6" in " ".join(done.stdout.split()) and "uniform" in done.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
@pytest.mark.parametrize("backend", ["auto", "cuda"])
def test_without_a_gpu_it_is_one_line(backend):
    done = command("--backend", backend)
    assert done.returncode == 2 and len(done.stderr.strip().splitlines()) == 1 and "--backend cpu" in done.stderr


def test_bad_arguments_are_one_line():
    done = command("--backend", "cpu", "--tokens", "many")
    assert done.returncode == 2 and done.stderr.strip() == "moe_tk bench layer: --tokens is 'many', wanted an integer"
