"""The probes on real GPUs: that they pass on good hardware, and that they notice a fault made on purpose."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from moe_tk.diagnose import diagnose, read_machine
from moe_tk.topology.probe import build_probe_library, run_probes
from moe_tk.topology.probe_plan import VERIFY_BYTES
from moe_tk.topology.probe_run import Limits, run_steps
from moe_tk.topology.verdict import decide


@pytest.fixture(scope="module")
def machine():
    return read_machine()


@pytest.fixture(scope="module")
def library(machine):
    return build_probe_library(sorted({gpu.arch for gpu in machine.visible if gpu.arch}))


def steps_on(library, steps, devices=2, **limits):
    return run_steps(steps, library=library, devices=devices, environ=os.environ, limits=Limits(**limits))


def verify(kind="push", engine="words", src=0, dst=1, **more):
    return {"do": "verify", "kind": kind, "engine": engine, "src": src, "dst": dst, "bytes": VERIFY_BYTES, **more}


@pytest.mark.gpu
def test_facts_of_real_gpus_are_all_there(machine):
    for gpu in machine.visible:
        for fact in ("uuid", "pci", "name", "arch", "sm_count", "memory_bytes", "shared_per_block", "cuda_index"):
            assert getattr(gpu, fact) is not None, fact
    assert machine.host.nvml_state == "ok" and machine.host.driver and machine.host.boot_id


@pytest.mark.gpu
def test_doc_23_doctor_initialises_no_cuda_and_forks_stay_usable():
    """libcuda may be mapped (NVML does that), but cuInit was never called here, and a forked child can use CUDA."""
    code = ("import ctypes, multiprocessing as mp\n"
            "from moe_tk.diagnose import diagnose\n"
            "report = diagnose()\n"
            "assert report.snapshot.gpus, report\n"
            "count = ctypes.c_int()\n"
            "code = ctypes.CDLL('libcuda.so.1').cuDeviceGetCount(ctypes.byref(count))\n"
            "assert code == 3, code  # CUDA_ERROR_NOT_INITIALIZED\n"
            "def child():\n"
            "    import torch\n"
            "    torch.cuda.init()\n"
            "    assert float(torch.ones(4, device='cuda').sum()) == 4\n"
            "p = mp.get_context('fork').Process(target=child); p.start(); p.join(120)\n"
            "assert p.exitcode == 0, p.exitcode\n")
    subprocess.run([sys.executable, "-c", code], check=True, timeout=240, env={**os.environ, "PYTHONPATH": "."})


@pytest.mark.multi_gpu
def test_a_gemm_beside_movers_does_not_wait_for_their_limit(library):
    """Six rounds with movers that would run for 5 s each if nobody stopped them."""
    mover = {"op": "push", "engine": "words", "payload": "copy", "sms": 4}
    movers = [{**mover, "device": 0, "peers": [1]}, {**mover, "device": 1, "peers": [0]}]
    gemms = [{"do": "gemm", "shape": [4096] * 3, "movers": moving, "devices": [0, 1]} for moving in ([], movers)]
    _, beside = steps_on(library, gemms)
    assert beside.how == "ok" and min(beside.data["gbs"]) > 5, beside
    assert beside.seconds < 5, beside


@pytest.mark.multi_gpu
@pytest.mark.parametrize("engine", ["words", "bulk"])
@pytest.mark.parametrize("kind", ["push", "pull"])
@pytest.mark.parametrize("ends", [(0, 1), (1, 0)])
def test_doc_15_good_hardware_reads_back_right(library, kind, engine, ends):
    (result,) = steps_on(library, [verify(kind, engine, *ends)])
    assert (result.how, result.data) == ("ok", {"status": "ok"}), result


@pytest.mark.multi_gpu
@pytest.mark.parametrize("engine", ["words", "bulk"])
@pytest.mark.parametrize("kind", ["push", "pull"])
def test_doc_15_one_wrong_word_is_found_at_its_place(library, kind, engine):
    (result,) = steps_on(library, [verify(kind, engine, fault=1)])
    assert result.data["status"] == "mismatch", result
    assert (result.data["bad_words"], result.data["offset"]) == (1, VERIFY_BYTES // 2)
    assert int(result.data["seen"], 16) ^ int(result.data["wanted"], 16) == 1


@pytest.mark.multi_gpu
@pytest.mark.parametrize("kind", ["push", "pull"])
def test_doc_17_a_flag_that_never_comes_ends_in_the_kernel(library, kind):
    result, after = steps_on(library, [verify(kind, fault=2), verify("push", src=1, dst=0)], step_s=4.0)
    assert result.data["status"] == "timeout" and result.seconds < 4.0, result
    assert after.data == {"status": "ok"}  # the context survives


@pytest.mark.multi_gpu
def test_doc_17_a_kernel_that_spins_on_is_killed_with_its_process(library, monkeypatch):
    monkeypatch.setattr("moe_tk.topology.probe_run._IN_KERNEL_SHARE", 100.0)  # the kernel's own limit is far away
    began = time.monotonic()
    results = steps_on(library, [verify(fault=2), verify("pull"), verify(src=1, dst=0)], step_s=2.0)
    assert [result.how for result in results] == ["timeout", "skipped", "skipped"]
    assert time.monotonic() - began < 60
    monkeypatch.undo()
    (after,) = steps_on(library, [verify()])
    assert after.data == {"status": "ok"}  # and the GPUs are usable


@pytest.mark.multi_gpu
def test_signals_and_increments(library):
    steps = [{"do": "signal", "src": 0, "dst": 1, "rounds": 2000},
             {"do": "atomics", "src": 0, "dst": 1, "sources": [0, 1], "increments": 2000}]
    signal, atomics = steps_on(library, steps)
    assert signal.data["status"] == "ok" and 0.3 < signal.data["value"] < 100, signal
    assert atomics.data["sent"] == 2 * 8 * 256 * 2000
    assert atomics.data["status"] in ("ok", "lost") and atomics.data["counted"] <= atomics.data["sent"]


@pytest.mark.multi_gpu
def test_errors_come_back_as_text(library):
    wrong, after = steps_on(library, [verify(bytes=1000), verify()])
    assert wrong.how == "error" and "multiple of 8192" in wrong.text
    assert after.data == {"status": "ok"}


@pytest.mark.multi_gpu
def test_quick_probes_make_the_verdict(machine, library, cache_dir):
    group = [gpu.uuid for gpu in machine.visible][:2]
    before = decide(machine, None, uuids=group)
    probes = run_probes(machine, group, os.environ, depth="quick", library=library)
    after = decide(machine, probes, uuids=group)
    assert not before.verified and after.verified and after.protocol == before.expected
    report = diagnose(probe="quick", uuids=group, snapshot=machine)
    kept = diagnose(uuids=group, snapshot=machine)
    assert kept.probe_age_s is not None and kept.verdict == report.verdict
    assert diagnose(uuids=group, snapshot=machine, use_cache=False).probes is None
