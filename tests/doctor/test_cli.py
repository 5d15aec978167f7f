"""`moe_tk doctor` as a person or a script uses it: output, exit status, files, and never a traceback unasked."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import machines
import pytest
from rich.console import Console

from moe_tk.cli.doctor_view import age_words, show
from moe_tk.cli.main import main
from moe_tk.topology.report import facts_from_json, make_report, report_to_json


@pytest.fixture
def doctor(tmp_path, monkeypatch, capsys, cache_dir):
    """doctor(machine, *arguments, environ=...) -> (status, stdout, stderr) on a recorded machine."""
    def run(machine, *arguments, environ=None):
        snapshot = machines.snapshot(machine, tmp_path, environ)
        monkeypatch.setattr("moe_tk.diagnose.read_machine", lambda environ=None: snapshot)
        status = main(["doctor", *arguments])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


@pytest.fixture
def saved(tmp_path):
    """saved(machine, probed) -> path of a report of a recorded machine."""
    def make(name, probed=True):
        machine = machines.load(name)
        snapshot = machines.snapshot(machine, tmp_path)
        probes = machines.passing(snapshot, rates=machines.recorded_rates(machine)) if probed else None
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps(report_to_json(make_report(snapshot, probes))))
        return str(path)

    return make


def test_cpu_machine_says_so_in_one_line(monkeypatch, capsys, cache_dir):
    from moe_tk.topology.facts import HostFacts, TopologySnapshot

    empty = TopologySnapshot(host=HostFacts(nvidia_hardware=False, nvml_state="nvml-library-missing",
                                            cuda_state="no-library"))
    monkeypatch.setattr("moe_tk.diagnose.read_machine", lambda environ=None: empty)
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert out.count("\n") == 1 and "CPU backend" in out and "usable" in out


@pytest.mark.parametrize(("name", "probed", "status"), [
    ("h100_x8_nvswitch", True, 0), ("h100_x8_nvswitch", False, 1), ("rtx_pro_5000_x4", True, 0),
    ("rtx5090_x2_x8", True, 1), ("driver_mismatch", False, 2), ("rtx4090_x2_no_p2p", False, 0)])
def test_exit_status(saved, name, probed, status, capsys):
    assert main(["doctor", "--snapshot", saved(name, probed)]) == status


def test_wrong_visible_devices_are_exit_2_without_traceback(doctor):
    status, out, err = doctor("h100_x8_nvswitch", "--width", "160", environ={"CUDA_VISIBLE_DEVICES": "0,9"})
    assert status == 2 and "CUDA_VISIBLE_DEVICES" in out and "Traceback" not in out + err


@pytest.mark.parametrize("name", machines.NAMES)
@pytest.mark.parametrize("width", [80, 160])
def test_every_machine_fits_the_terminal(saved, name, width, capsys):
    main(["doctor", "--snapshot", saved(name), "--width", str(width)])
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= width
    assert "Traceback" not in out and "None" not in out


def test_matrix_and_verdict_are_on_the_first_screen(saved, capsys):
    main(["doctor", "--snapshot", saved("nvlink_two_islands"), "--width", "80"])
    first = "\n".join(capsys.readouterr().out.splitlines()[:40])
    for part in ("pcie", "NV6 ok", "SYS ok", "nvlink-islands", "H200 NVL"):
        assert part in first


def test_colours_only_on_a_terminal(saved, tmp_path):
    piped = subprocess.run([sys.executable, "-m", "moe_tk", "doctor", "--snapshot", saved("h100_x8_nvswitch")],
                           capture_output=True, text=True, env={**os.environ, "PYTHONPATH": os.getcwd()}, timeout=60)
    assert piped.returncode == 0 and "\x1b[" not in piped.stdout, piped.stderr
    machine = machines.load("h100_x8_nvswitch")
    snapshot = machines.snapshot(machine, tmp_path)
    stream = io.StringIO()
    show(make_report(snapshot), console=Console(file=stream, force_terminal=True, width=80, color_system="truecolor"))
    assert "\x1b[" in stream.getvalue()


def test_json_is_complete_and_stable(doctor):
    status, out, _ = doctor("nvlink_bridges_two_pairs", "--json")
    data = json.loads(out)
    assert data["schema"] == "moe_tk.doctor/1" and data["exit_code"] == status
    assert data["protocol"] == "staged" and data["verdict"]["expected"] == "pcie"
    assert len(data["snapshot"]["pairs"]) == 6 and data["snapshot"]["gpus"][0]["multicast"] == "unknown"


def test_save_then_analyse_elsewhere(doctor, tmp_path, capsys):
    path = tmp_path / "report.json"
    status, _, _ = doctor("nvlink_two_islands", "--save", str(path))
    assert main(["doctor", "--snapshot", str(path), "--json"]) == status
    again = json.loads(capsys.readouterr().out)
    assert again["verdict"] == json.loads(path.read_text())["verdict"] and again["source"] == str(path)
    assert [name for name in os.listdir(tmp_path) if name.startswith(".report")] == []


def test_snapshot_of_only_facts_is_enough(tmp_path, capsys):
    from moe_tk.topology.facts import snapshot_to_json

    path = tmp_path / "facts.json"
    path.write_text(json.dumps(snapshot_to_json(machines.snapshot("rtx_pro_5000_x4", tmp_path))))
    assert main(["doctor", "--snapshot", str(path), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["verdict"]["expected"] == "pcie"


@pytest.mark.parametrize("content", ["", "{", "[]", '{"schema": "x"}', '{"schema": "moe_tk.doctor/1"}',
                                     '{"schema": "moe_tk.topology/1", "gpus": 3}'])
def test_a_bad_snapshot_file_is_one_line(tmp_path, capsys, content):
    path = tmp_path / "bad.json"
    path.write_text(content)
    assert main(["doctor", "--snapshot", str(path)]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "Traceback" not in err


def test_missing_file_and_unwritable_save(tmp_path, capsys, doctor):
    assert main(["doctor", "--snapshot", str(tmp_path / "nothing.json")]) == 2
    assert "nothing.json" in capsys.readouterr().err
    status, _, err = doctor("rtx4090_x2_no_p2p", "--save", str(tmp_path / "no" / "folder.json"))
    assert status == 2 and "Traceback" not in err


def test_a_fault_in_here_is_one_line_and_debug_shows_it(monkeypatch, capsys):
    def broken(**kwargs):
        raise ZeroDivisionError("a fault of ours")

    monkeypatch.setattr("moe_tk.cli.doctor.diagnose", broken)
    assert main(["doctor"]) == 2
    err = capsys.readouterr().err
    assert "a fault of ours" in err and "--debug" in err and "Traceback" not in err
    with pytest.raises(ZeroDivisionError):
        main(["doctor", "--debug"])


def test_group_ranks_and_says_why(doctor):
    status, out, _ = doctor("nvlink_two_islands", "--group", "4", "--width", "160")
    assert "0, 1, 2, 3" in out and "6 x NV6" in out and "70 possible" in out
    status, _, err = doctor("rtx4090_x2_no_p2p", "--group", "5")
    assert status == 2 and "1 to 2" in err


def test_forced_protocol_says_so(doctor, monkeypatch):
    monkeypatch.setenv("MOE_TK_PROTOCOL", "staged")
    _, out, _ = doctor("rtx_pro_5000_x4", "--width", "160")
    assert "asked for by MOE_TK_PROTOCOL" in out
    monkeypatch.setenv("MOE_TK_PROTOCOL", "pigeons")
    status, _, err = doctor("rtx_pro_5000_x4")
    assert status == 2 and "pigeons" in err and "nvlink" in err


def test_probe_without_a_compiler_is_a_warning(doctor, monkeypatch):
    from moe_tk.topology.probe import ProbesNotRun

    def no_compiler(archs):
        raise ProbesNotRun("no CUDA toolkit: no nvcc found", "install one")

    monkeypatch.setattr("moe_tk.topology.probe.build_probe_library", no_compiler)
    status, out, _ = doctor("h100_x8_nvswitch", "--probe", "--width", "160")
    assert status == 1 and "probes-not-run" in out and "no nvcc found" in out


def test_age_in_words():
    words = [age_words(s) for s in (5, 60, 200, 7200, 90000)]
    assert words == ["5 seconds", "1 minute", "3 minutes", "2 hours", "1 day"]


RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


@pytest.mark.parametrize("name", ["doctor_h200_x2", "doctor_h200_x2_first"])
def test_the_kept_reports_of_a_real_machine_can_be_read(name, capsys):
    path = RESULTS / f"{name}.json"
    for width in (80, 160):
        assert main(["doctor", "--snapshot", str(path), "--width", str(width), "--group", "2"]) == 0
        out = capsys.readouterr().out
        assert max(map(len, out.splitlines())) <= width and "NVLink between all GPUs (pairs: 1), verified" in out
    assert "tools for builds" in out and "Python.h" in out and "ninja" in out


def test_the_reference_of_the_gemm_is_doubted_when_parked_sms_slow_it_more(capsys):
    main(["doctor", "--snapshot", str(RESULTS / "doctor_h200_x2.json"), "--width", "80"])
    (line,) = [line for line in capsys.readouterr().out.splitlines() if re.match(r"\s*32\s+push", line)]
    assert "?" in line and "-4" not in line


def test_the_recorded_h200_machine_is_the_one_that_the_report_saw(tmp_path):
    """The fixture, replayed through the reader, gives the facts that the reader found on the machine itself."""
    import dataclasses

    real, _ = facts_from_json(json.loads((RESULTS / "doctor_h200_x2_first.json").read_text()))
    replayed = machines.snapshot("h200_x2", tmp_path)
    for seen, again in zip(real.gpus, replayed.gpus, strict=True):
        differing = {f.name for f in dataclasses.fields(seen) if getattr(seen, f.name) != getattr(again, f.name)}
        assert differing <= {"fabric_id"}, differing  # an all-zero cluster id, left out of the fixture
    for seen, again in zip(real.pairs, replayed.pairs, strict=True):
        differing = {f.name for f in dataclasses.fields(seen) if getattr(seen, f.name) != getattr(again, f.name)}
        assert differing <= {"native_atomics"}, differing  # the fake CUDA child does not answer that
    for name in ("driver", "cuda_version", "container", "virtual_machine", "kernel", "cpu", "driver_module"):
        assert getattr(real.host, name) == getattr(replayed.host, name), name
