"""`moe_tk trace` from end to end on the CPU back end, and its errors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from moe_tk.bench.shapes import SHAPES
from moe_tk.cli import main as cli
from moe_tk.errors import ArgumentError
from moe_tk.trace import options as parse
from moe_tk.trace.options import Point, path_of
from moe_tk.trace.record import CPU_KERNELS, laps_of_events

REPO = Path(__file__).resolve().parents[2]
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")


def trace(*words: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": str(REPO), "COLUMNS": "120"}
    return subprocess.run([sys.executable, "-m", "moe_tk", "trace", *words], env=environment, capture_output=True, text=True,
                          timeout=120)


def test_a_call_on_the_cpu_gives_table_trace_picture_and_numbers(tmp_path):
    files = {name: tmp_path / f"call.{name}" for name in ("json.gz", "svg", "json")}
    done = trace("--backend", "cpu", "--world", "3", "--tokens", "32", "--mode", "tp", "--out", str(files["json.gz"]), "--picture",
                 str(files["svg"]), "--json", str(files["json"]))
    assert done.returncode == 0, done.stderr
    assert "256x128-e16k4, TP, 32 tokens on each of 3 ranks" in done.stdout and "gemm_scatter" in done.stdout
    for path in files.values():
        assert path.stat().st_size > 100 and f"written: {path}" in done.stdout.replace("\n", "")
    content = json.loads(files["json"].read_text())
    (call,) = content["calls"]
    told = [call[name] for name in ("shape", "mode", "backend", "world", "tokens_per_rank")]
    assert told == ["256x128-e16k4", "tp", "cpu", 3, 32]
    for rank in call["ranks"]:
        sums = {**rank["kernels"]["gather_gemm"]["sum_us"], **rank["kernels"]["gemm_scatter"]["sum_us"]}
        assert {"dispatch", "gemm1", "gemm2", "combine", "reduce"} <= set(sums) and rank["lost"] == 0


def test_several_calls_have_their_names_in_their_files(tmp_path):
    done = trace("--backend", "cpu", "--tokens", "8,16", "--out", str(tmp_path / "call.json"))
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["call-256x128-e16k4-ep-16.json", "call-256x128-e16k4-ep-8.json"]
    for path in tmp_path.iterdir():
        assert json.loads(path.read_text())["traceEvents"]


@pytest.mark.parametrize("words, text", [
    (["--shape", "huge"], "shape 'huge' is not known: wanted seed, qwen3-30b-a3b"),
    (["--tokens", "many"], "--tokens is 'many', wanted an integer from 1 to"), (["--tokens", "8,0"], "--tokens is 0, wanted"),
    (["--mode", "pp"], "--mode is 'pp', wanted one of ep, tp"), (["--backend", "tpu"], "--backend is 'tpu'"),
    (["--blocks", "-1"], "--blocks is -1"), (["--world", "99"], "--world is 99, wanted an integer from 1 to 32"),
    (["--routing", "odd"], "--routing is 'odd'"), (["--out", "/nowhere/x.json"], "--out /nowhere/x.json: the folder"),
    (["--picture", "/"], "--picture /: is a folder, wanted a file")])
def test_bad_arguments_are_one_sentence(words, text, capsys):
    assert cli.main(["trace", *(["--backend", "cpu"] if "--backend" not in words else []), *words]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"moe_tk trace: {text}") and err.count("\n") == 1


def test_a_missing_value_is_one_sentence(capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(["trace", "--tokens"])
    assert caught.value.code == 2 and capsys.readouterr().err.count("\n") == 1


@no_gpu
@pytest.mark.parametrize("words, text", [([], "wants 1 GPU of compute capability 9.0 (Hopper) for 1 rank, and there are none here"),
                                         (["--world", "2"], "wants 2 GPUs of compute capability 9.0 (Hopper) for 2 ranks")])
def test_without_gpus_it_says_so_and_what_to_use(words, text, capsys):
    assert cli.main(["trace", "--backend", "cuda", *words]) == 1
    err = capsys.readouterr().err
    assert text in err and "use --backend cpu" in err and err.count("\n") == 1


def test_points_know_their_layer_and_their_files():
    points = Point(SHAPES["seed"], 512, "ep"), Point(SHAPES["seed"], 512, "tp")
    assert points[0].sizes == {"hidden_size": 4096, "intermediate_size": 3072, "num_experts": 64, "top_k": 8}
    assert path_of("a/b.json.gz", points[1], points) == Path("a/b-seed-tp-512.json.gz")
    assert path_of("a/b.json.gz", points[0], points[:1]) == Path("a/b.json.gz")
    with pytest.raises(ArgumentError, match="wanted an integer from 1"):
        parse._integer("--n", "1.5", 1, 2)


def test_events_of_the_cpu_become_laps_of_waiting_and_work():
    events = [(0, 1, "gemm1", 7, 1_000, 1_400, 2_000), (0, 1, "dispatch", 3, 500, 500, 900),
              (1, 0, "combine", 2, 3_000, 3_000, 3_100)]
    found = laps_of_events(1, events, CPU_KERNELS["two_kernel"], {})
    laps = found.laps
    assert found.origin_ns == 500 and found.kernels == ("gather_gemm", "gemm_scatter")
    rows = list(zip(laps.kernel, laps.block, laps.kind, laps.detail, laps.begin, laps.end, strict=True))
    assert rows == [(0, 1, 1, 3, 0, 400), (0, 1, 7, 7, 500, 900), (0, 1, 2, 7, 900, 1_500), (1, 0, 4, 2, 2_500, 2_600)]
    assert found.blocks_begun.tolist() == [[0, 1, 0], [1, 0, 2_500]]
    assert len(laps_of_events(0, [], ("mega",), {}).laps) == 0
