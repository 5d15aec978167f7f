"""The toolchain in the report: every candidate, the choice and why, and what is missing (BLD-04, BLD-05, BLD-15)."""

from __future__ import annotations

import stat

import pytest

from moe_tk import diagnose_tools
from moe_tk.builder import cuda_toolkit, toolchain
from moe_tk.topology.facts import HostFacts, TopologySnapshot
from moe_tk.topology.findings import find
from moe_tk.topology.verdict import decide


@pytest.fixture
def toolkits(tmp_path, monkeypatch):
    """make(folder, version, header, files): a toolkit with a fake nvcc; nothing else is found on this machine."""
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.setattr(cuda_toolkit, "_package_roots", lambda: [])
    local = tmp_path / "usr-local"
    find = cuda_toolkit.find_toolkits
    monkeypatch.setattr(cuda_toolkit, "find_toolkits", lambda: find(str(local)))
    monkeypatch.setattr(cuda_toolkit, "torch_cuda_version", lambda: "13.0")

    def make(folder, version, header=None, leave_out=(), on_path=False):
        root = tmp_path / folder
        for name in cuda_toolkit.USED_FILES:
            if name not in leave_out:
                path = root / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text("")
        major, minor = (header or version).split(".")
        if "include/cuda.h" not in leave_out:
            (root / "include" / "cuda.h").write_text(f"#define CUDA_VERSION {int(major) * 1000 + int(minor) * 10}\n")
        nvcc = root / "bin" / "nvcc"
        nvcc.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {version}, V{version}.0'\n")
        nvcc.chmod(nvcc.stat().st_mode | stat.S_IXUSR)
        if on_path:
            monkeypatch.setenv("PATH", str(root / "bin"))
        return root

    make.local = local
    return make


def told(archs):
    facts, problems = diagnose_tools.read_tools(archs)
    snapshot = TopologySnapshot(host=HostFacts(cuda_state="no-device"), tools=tuple(facts), problems=tuple(problems))
    return facts, {item.id: item for item in find(snapshot, None, decide(snapshot))}


def test_bld_04_all_nvcc_candidates_are_listed_with_choice_and_reason(toolkits):
    toolkits("old", "11.5", on_path=True)
    new = toolkits("usr-local/cuda", "13.0")
    facts, found = told(["sm_90"])
    nvcc = [fact for fact in facts if fact.what == "nvcc"]
    assert [(fact.version, fact.chosen) for fact in nvcc] == [("11.5", False), ("13.0", True)]
    assert "11.5" in nvcc[0].note and nvcc[1].path == str(new / "bin" / "nvcc")
    assert "sm_90a" in nvcc[1].note and "13.0" in nvcc[1].note
    assert "nvcc-missing" not in found


def test_bld_04_nothing_usable_is_told(toolkits):
    toolkits("old", "11.5", on_path=True)
    _, found = told(["sm_90"])
    assert "11.5" in found["nvcc-missing"].text and found["nvcc-missing"].level == "warn"


def test_bld_05_another_major_version_than_torch_is_an_error(toolkits):
    toolkits("usr-local/cuda", "12.9")
    _, found = told(["sm_90"])
    assert found["nvcc-torch-major"].level == "fail"
    assert "13.0" in found["nvcc-torch-major"].text and "MOE_TK_ALLOW_CUDA_MISMATCH" in found["nvcc-torch-major"].fix


def test_bld_05_headers_of_another_minor_version_are_a_warning(toolkits):
    toolkits("usr-local/cuda", "13.3", header="13.0")
    _, found = told(["sm_90"])
    assert found["nvcc-headers-minor"].level == "warn" and "13.3" in found["nvcc-headers-minor"].text


def test_bld_15_every_program_and_header_is_listed_present_or_not(toolkits):
    toolkits("usr-local/cuda", "13.0", leave_out=("nvvm/bin/cicc",))
    facts, found = told(["sm_90"])
    assert "nvvm/bin/cicc" in found["nvcc-missing"].text or "missing" in " ".join(fact.note for fact in facts)
    toolkits("usr-local/cuda", "13.0")
    (toolkits.local / "cuda" / "nvvm" / "bin" / "cicc").write_text("")
    facts, _ = told(["sm_90"])
    listed = {fact.what for fact in facts}
    assert {"nvcc", "bin/ptxas", "include/cuda_runtime.h", "Python.h", "pybind11", "ninja", "torch"} <= listed


def test_bld_15_missing_ninja_is_told(monkeypatch):
    monkeypatch.setattr(toolchain, "find_ninja", lambda: toolchain.NeededFile("ninja", None, "ninja is missing"))
    _, found = told([])
    assert "ninja" in found["tool-missing"].text


def test_no_gpu_needs_no_nvcc(toolkits):
    _, found = told([])
    assert "nvcc-missing" not in found


def test_torch_facts_without_importing_torch(monkeypatch):
    facts, problems = diagnose_tools._read_torch(None, gpus=True)
    assert [problem.id for problem in problems] == ["torch-without-cuda"] and facts[0].version
    assert diagnose_tools._read_torch("13.0", gpus=True)[1] == []
    monkeypatch.setattr(diagnose_tools.importlib.util, "find_spec", lambda name: None)
    assert [problem.id for problem in diagnose_tools._read_torch(None, gpus=False)[1]] == ["torch-missing"]


def test_sym_04_the_verdict_names_both_gpus_of_a_pair_without_peer_access(machine_snapshot):
    verdict = decide(machine_snapshot("rtx4090_x2_no_p2p"), override="pcie", override_by="the argument protocol")
    assert "no peer access for GPU 0 - GPU 1" in verdict.text and not verdict.usable
