"""What the command accepts, and that every bad argument is one sentence that names it."""

from __future__ import annotations

from pathlib import Path

import pytest
from bench_helpers import arguments, options

from moe_tk.bench.options import parse_options
from moe_tk.bench.shapes import SHAPES, Shape, parse_shapes
from moe_tk.errors import ArgumentError

REPORT = Path(__file__).parents[2] / "benchmarks" / "results" / "doctor_h200_x2.json"


def test_shapes_by_name_short_name_and_numbers():
    assert [shape.name for shape in parse_shapes("seed,qwen3")] == ["seed", "qwen3-30b-a3b"]
    assert parse_shapes("4096,3072,64,8") == [Shape("4096x3072-e64k8", 4096, 3072, 64, 8)]
    assert len(parse_shapes("all")) == len(SHAPES) == 7


@pytest.mark.parametrize(("text", "said"), [("qwen9", "qwen9"), ("4096,3072,64", "has 3 numbers"), ("4095,8,4,2", "H is 4095"),
                                            ("4096,8,4,5", "k is 5"), ("", "''")])
def test_bad_shapes_are_named(text, said):
    with pytest.raises(ArgumentError, match=said):
        parse_shapes(text)


def test_defaults_of_the_cpu_back_end_are_tiny():
    found = options()
    assert found.modes == ("ep", "tp") and found.tokens == (64,) and found.patterns == ("two_kernel", "serial")
    assert found.shapes[0].hidden == 256 and found.against == ("torch", "triton") and found.sustained_s == 0


def test_repeated_and_listed_values():
    found = options("--shape", "seed,olmoe", "--shape", "64,64,4,1", "--tokens", "1,2,3", "--mode", "tp", "--routing", "zipf:1.5",
                    "--routing", "balanced", "--against", "none", "--sustained")
    assert [shape.name for shape in found.shapes] == ["seed", "olmoe", "64x64-e4k1"]
    assert found.tokens == (1, 2, 3) and found.routings == ("zipf:1.5", "balanced") and found.against == ()
    assert found.sustained_s == 1.0 and found.total_lines == 3 * 1 * 1 * 2 * 3


def test_serial_is_one_of_ours_or_what_the_others_are_compared_with_but_not_both():
    assert options("--against", "torch").patterns == ("two_kernel", "serial")
    found = options("--against", "serial,torch")
    assert found.patterns == ("two_kernel",) and found.against == ("serial", "torch")
    assert options("--pattern", "auto,serial,mega", "--against", "serial").patterns == ("auto", "mega")
    assert options("--pattern", "serial", "--against", "none").patterns == ("serial",)


@pytest.mark.parametrize(("words", "said"), [
    (["--pattern", "serial", "--against", "serial,torch"], "--pattern serial and --against serial,torch leave nothing"),
    (["--against", "two_kernel"], "--against is 'two_kernel'"),
    (["--tokens", "64,many"], "--tokens is 'many'"), (["--tokens", "0"], "--tokens is 0"), (["--mode", "pp"], "--mode is 'pp'"),
    (["--dtype", "fp4"], "--dtype is 'fp4'"), (["--routing", "gaussian"], "gaussian"), (["--routing", "zipf:steep"], "steep"),
    (["--routing", "none/such.npz"], "no such file"), (["--pattern", "magic"], "magic"), (["--against", "cublas"], "cublas"),
    (["--rounds", "0"], "--rounds is 0"), (["--pause-ms", "-1"], "--pause-ms"), (["--json", "/no/such/folder/a.json"], "no folder"),
    (["--attribute"], "--attribute"), (["--sweep", "comm-sms"], "--sweep"), (["--sweep", "colours"], "colours"),
    (["--flush-l2"], "--flush-l2"), (["--world", "9"], "--world is 9"), (["--hbm-tbs", "fast"], "fast"),
    (["--doctor", "/no/such/report.json"], "--doctor")])
def test_bad_arguments_are_named(words, said):
    with pytest.raises(ArgumentError, match=said):
        options(*words)


def test_machine_numbers_come_from_the_command_or_from_the_doctor():
    assert options("--hbm-tbs", "3.3", "--wire-gbs", "50").numbers.wire_gbs == 50
    measured = options("--doctor", str(REPORT)).numbers
    assert 300 < measured.wire_gbs < 400 and measured.hbm_tbs == 4.59
    assert options("--doctor", str(REPORT), "--wire-gbs", "50").numbers.wire_gbs == 50


def test_calls_of_a_sample():
    assert [options().calls_per_sample(tokens) for tokens in (1, 512, 513, 2048, 8192)] == [8, 8, 4, 4, 2]
    assert options("--calls", "3").calls_per_sample(1) == 3


def test_without_a_gpu_it_says_what_to_do(monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ArgumentError, match="--backend cpu"):
        parse_options(arguments())
