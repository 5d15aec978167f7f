"""`moe_tk demo` as people run it: command, torchrun, wrong arguments, wrong results, ranks that fail."""

from __future__ import annotations

import argparse
import json
import os
import pty
import threading

import pytest
from backends import cuda
from demo_helpers import break_rank_1, corrupt_weight, run_python

from moe_tk.cli.demo import add_arguments
from moe_tk.cli.main import main
from moe_tk.demo import gpus, results, start
from moe_tk.demo.options import Options, default_world, parse_options
from moe_tk.runtime.launcher import RankFailure

PATTERNS = ["serial", "two_kernel", "mega"]


def _drain(terminal: int, into: list[bytes]) -> None:
    while True:
        try:
            part = os.read(terminal, 4096)
        except OSError:  # the other end is closed
            return
        if not part:
            return
        into.append(part)


@pytest.fixture(scope="module", autouse=True)
def built_module():
    """Compiled before the time limits count."""
    start.build_module()


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory):
    """(finished process, JSON, what the terminal got): two ranks, both modes, all patterns; stdout piped, stderr a terminal."""
    path = tmp_path_factory.mktemp("demo") / "run.json"
    terminal, its_end = pty.openpty()
    shown: list[bytes] = []
    reader = threading.Thread(target=_drain, args=(terminal, shown))
    reader.start()
    try:
        done = run_python("-m", "moe_tk", "demo", "--backend", "cpu", "--world", "2", "--tokens", "300", "--calls", "2", "--json",
                          str(path), stdout=-1, stderr=its_end)
    finally:
        os.close(its_end)
        reader.join(10)
        os.close(terminal)
    assert done.returncode == 0, b"".join(shown).decode()
    return done, json.loads(path.read_text()), b"".join(shown).decode(), path


def test_piped_report_is_plain_and_complete(whole_run):
    done, _, _, _ = whole_run
    assert "\x1b" not in done.stdout
    for heading in ("What is computed", "Who did what when: EP mega", "When the results leave", "Readiness", "Bytes moved",
                    "Work / wait", "The plan of", "Is it right?", "Why fuse?"):
        assert heading in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert done.stdout.strip().splitlines()[-1].strip().startswith("PASS  6 of 6 within the error budget, repeats bitwise equal")


def test_picture_has_a_row_for_every_block(whole_run):
    done, _, _, _ = whole_run
    part = done.stdout.partition("Who did what when")[2].partition("When the results leave")[0].splitlines()
    seen = set()
    for rank in range(2):
        start_row = next(index for index, line in enumerate(part) if line.startswith(f"rank {rank} send"))
        letters = set("".join(line[16:] for line in part[start_row:start_row + 4]))
        # Moving hides a GEMM that is short beside a slot of time, as on a rank of a call that the machine has stretched.
        assert {"d", "c", "r"} <= letters and letters & {"1", "2"}
        seen |= letters
    assert {"1", "2"} <= seen


def test_terminal_sees_a_bar_while_it_works(whole_run):
    _, _, shown, _ = whole_run
    assert "\x1b[" in shown and "EP: timed calls" in shown and "24/24" in shown


def test_json_has_the_whole_run(whole_run):
    _, content, _, path = whole_run
    assert content["passed"] is True and content["world"] == 2 and content["tokens"] == [150, 150]
    assert {"moe_tk", "python", "torch", "cpu", "cores", "date", "command"} <= content["environment"].keys()
    assert "--world 2" in content["environment"]["command"]
    ran = [(result["mode"], result["pattern"]) for result in content["results"]]
    assert ran == [(mode, pattern) for mode in ("ep", "tp") for pattern in PATTERNS]
    assert content["reference_vs_shipped"] < 1e-6
    for result in content["results"]:
        assert 0 < result["error"] <= content["error_budget"] and 0 < result["error_vs_shipped"] <= content["error_budget"]
        assert result["repeats_equal"] and result["calls"] == 4 and len(result["seconds"]) == 2 and len(result["ranks"]) == 2
        assert result["time_over_serial"] == 1.0 if result["pattern"] == "serial" else result["time_over_serial"] > 0
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_json_of_a_fused_pattern_says_what_moved(whole_run):
    _, content, _, _ = whole_run
    row = 2 * content["layer"]["hidden_size"]
    tp_mega = content["results"][5]
    assert tp_mega["bytes_dispatched"] == tp_mega["bytes_combined"] == [[0, 150 * row], [150 * row, 0]]
    for result in content["results"]:
        fused = result["pattern"] != "serial"
        assert (result["bytes_dispatched"] is not None) == fused == bool(result["timeline"])
        if fused:
            assert {"dispatch", "gemm1", "gemm2", "combine", "reduce"} <= result["busy_s"].keys()
            assert len(result["timeline"]["lanes"]) == 2 * len(content["modes"]["ep"]["starting_roles"])
    with_segments = content["modes"]["ep"]["readiness"][0]
    assert with_segments["2"]["jobs_50"] < with_segments["1"]["jobs_50"]


def test_two_kernel_and_mega_give_the_same_bits(whole_run):
    _, content, _, _ = whole_run
    digests = {(r["mode"], r["pattern"]): [rank["digests"] for rank in r["ranks"]] for r in content["results"]}
    assert digests["ep", "mega"] == digests["ep", "two_kernel"] and digests["tp", "mega"] == digests["tp", "two_kernel"]


def test_torchrun_ranks_are_joined_and_rank_0_prints(tmp_path):
    path = tmp_path / "run.json"
    done = run_python("-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "moe_tk", "demo", "--tokens", "64",
                      "--calls", "1", "--pattern", "serial,mega", "--backend", "cpu", "--json", str(path))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("PASS  4 of 4") == 1 and "\x1b" not in done.stdout + done.stderr
    assert done.stderr.count("EP: timed calls") == 1  # plain lines, from one rank
    assert json.loads(path.read_text())["tokens"] == [32, 32]


def test_uneven_ranks_and_a_rank_without_tokens(capsys):
    words = ["--uneven", "--tokens", "60", "--calls", "1", "--mode", "ep", "--pattern", "mega", "--backend", "cpu"]
    assert main(["demo", "--world", "3", *words]) == 0
    assert "tokens: 40, 20, 0" in capsys.readouterr().out


def test_budget_of_0_is_exit_1(capsys, monkeypatch):
    monkeypatch.setattr(results, "error_budget", lambda ranks: 0.0)
    words = ["--tokens", "16", "--calls", "1", "--mode", "ep", "--pattern", "mega", "--backend", "cpu"]
    assert main(["demo", "--world", "1", *words]) == 1
    out = capsys.readouterr().out
    assert "FAIL  over the error budget: EP mega" in out and "OVER BUDGET" in out and "PASS" not in out


def test_slow_machine_gets_fewer_timed_calls():
    options = Options(world=2, modes=("ep",), patterns=("mega",), tokens=16, timed_limit_s=0.0)
    done = []
    (result,) = results.merge(start.start_ranks(options, lambda stage, count: done.append(count)))
    assert len(result.seconds) == 3 and result.num_calls == 5 and sum(done) == 9  # the bar is full all the same


def test_wrong_weight_is_over_the_budget():
    options = Options(world=2, modes=("ep",), patterns=("serial", "mega"), tokens=64, calls=1)
    merged = results.merge(start.start_ranks(options, lambda stage, done: None, target=corrupt_weight))
    assert [result.passed for result in merged] == [False, False] and all(result.error > 0.05 for result in merged)
    assert all(result.repeats_equal for result in merged)


@pytest.mark.parametrize(("calls", "text"), [(1, "ValueError: no table today"), (2, "process ended with exit code -9")])
def test_the_rank_that_failed_is_named_in_one_line(calls, text):
    options = Options(world=2, modes=("ep",), patterns=("mega",), tokens=64, calls=calls)
    with pytest.raises(RankFailure) as caught:
        start.start_ranks(options, lambda stage, done: None, target=break_rank_1)
    assert str(caught.value).startswith(f"rank 1 failed: {text}") and "\n" not in str(caught.value)
    assert "1 other rank stopped because of it" in str(caught.value)


def test_failure_is_one_line_and_debug_shows_the_tracebacks(monkeypatch, capsys):
    monkeypatch.setattr(start, "_rank_main", break_rank_1)
    words = ["demo", "--world", "2", "--mode", "ep", "--pattern", "mega", "--tokens", "64", "--calls", "1", "--backend", "cpu"]
    assert main([*words, "--debug"]) == 1
    err = capsys.readouterr().err
    assert "moe_tk: RankFailure: rank 1 failed: ValueError: no table today" in err
    assert err.count("Traceback (most recent call last)") == 2 and "in broken" in err


H200 = {"index": 0, "name": "NVIDIA H200", "major": 9, "minor": 0}
TWO = {"devices": [H200, {**H200, "index": 1}], "peers": [{"from": a, "to": 1 - a, "access": 1} for a in (0, 1)]}


@pytest.mark.parametrize(("machine", "words", "backend", "devices"), [
    (TWO, [], "cuda", (0, 1)), (TWO, ["--backend", "cpu"], "cpu", ()), (TWO, ["--world", "1"], "cuda", (0, 1)),
    (TWO, ["--world", "3"], "cpu", ()), (TWO, ["--pattern", "mega,two_kernel"], "cpu", ()),
    (TWO, ["--pattern", "two_kernel"], "cuda", (0, 1)), ({**TWO, "peers": []}, ["--backend", "cuda"], "cuda", (0,)),
    ({"devices": [{**H200, "major": 8}], "peers": []}, [], "cpu", ()),
    ({"devices": [], "peers": [], "error": "none"}, [], "cpu", ()),
])
def test_back_end_follows_the_gpus_and_what_was_asked_for(machine, words, backend, devices, monkeypatch):
    monkeypatch.setattr(gpus, "query_cuda", lambda environ: machine)
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    options = parse_options(parser.parse_args(words))
    assert (options.backend, options.devices) == (backend, devices)
    if backend == "cuda":
        assert "mega" not in options.patterns and default_world(options) == len(devices)
    elif "--pattern" not in words:
        assert options.patterns == ("serial", "two_kernel", "mega") and default_world(options) == 4


@pytest.mark.parametrize(("machine", "words", "text"), [
    ({"devices": [], "peers": [], "error": "no driver"}, [], "no driver"), (TWO, ["--world", "3"], "3 ranks, but 2 GPUs can work"),
    (TWO, ["--pattern", "mega"], "--pattern mega: GPUs have"),
    ({"devices": [{**H200, "name": "A100", "major": 8}], "peers": []}, [], "no GPU of compute capability 9.0 (Hopper) among A100"),
])
def test_what_gpus_cannot_do_is_one_line(machine, words, text, monkeypatch, capsys):
    monkeypatch.setattr(gpus, "query_cuda", lambda environ: machine)
    assert main(["demo", "--backend", "cuda", *words]) == 2
    err = capsys.readouterr().err
    assert err.startswith("moe_tk demo: --backend cuda: ") and text in err and err.count("\n") == 1


@pytest.mark.parametrize(("backend", "world"), [cuda(1, world=1), cuda(2, world=2)])
def test_real_layer_on_gpus(backend, world, tmp_path):
    """The command on GPUs: right, repeats equal, a time for each pattern, and nothing that was not measured."""
    path = tmp_path / "run.json"
    done = run_python("-m", "moe_tk", "demo", "--backend", backend, "--world", str(world), "--calls", "3", "--json", str(path))
    assert done.returncode == 0, done.stdout + done.stderr
    content = json.loads(path.read_text())
    assert len(content["gpus"]) == world and content["passed"]
    for result in content["results"]:
        assert result["error"] <= content["error_budget"] and result["repeats_equal"] and len(result["seconds"]) == 3
        assert result["timeline"] is None and result["busy_s"] == {} and all(0 < value < 0.1 for value in result["seconds"])
    assert "How long does it take?" in done.stdout and "Who did what when" not in done.stdout and "PASS" in done.stdout


@pytest.mark.parametrize(("words", "text"), [
    (["--world", "0"], "--world is 0, wanted an integer from 1 to 8"),
    (["--world", "two"], "--world is 'two', wanted an integer from 1 to 8"),
    (["--mode", "pp"], "--mode is 'pp', wanted one of ep, tp, both"),
    (["--pattern", "mega,giga"], "--pattern is 'giga', wanted one of serial, two_kernel, mega"),
    (["--backend", "rocm"], "--backend is 'rocm', wanted one of auto, cpu, cuda"),
    (["--backend", "cuda", "--pattern", "mega"], "--backend cuda: "),
    (["--tokens", "4097"], "--tokens is 4097, wanted an integer from 1 to 4096"),
    (["--json", "no/such/folder/x.json"], "the folder"),
    (["--calls"], "expected one argument"),
])
def test_wrong_arguments_are_one_line_and_exit_2(words, text, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    try:
        status = main(["demo", *words])
    except SystemExit as stop:
        status = stop.code
    captured = capsys.readouterr()
    assert status == 2 and captured.out == ""
    assert captured.err.startswith("moe_tk demo: ") and text in captured.err and captured.err.count("\n") == 1
