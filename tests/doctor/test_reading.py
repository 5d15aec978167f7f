"""Reading a machine: which GPU is which, what is visible, and single queries that fail (BUGLOG section A)."""

from __future__ import annotations

import importlib.machinery
import json
import os
import subprocess
import sys

import machines
import pytest
from fake_nvml import FakeNvml

from moe_tk.topology.facts import snapshot_from_json, snapshot_to_json
from moe_tk.topology.findings import exit_code, find
from moe_tk.topology.nvml import open_nvml
from moe_tk.topology.reader import query_cuda, take_snapshot
from moe_tk.topology.verdict import decide
from moe_tk.topology.visible import resolve_visible


def findings_of(snapshot, probes=None, **group):
    verdict = decide(snapshot, probes, **group)
    found = find(snapshot, probes, verdict)
    return verdict, {item.id: item for item in found}, exit_code(verdict, found)


@pytest.mark.parametrize("name", machines.NAMES)
def test_every_recorded_machine_reads_and_survives_json(name, machine_snapshot):
    snapshot = machine_snapshot(name)
    assert snapshot_from_json(json.loads(json.dumps(snapshot_to_json(snapshot)))) == snapshot
    assert decide(snapshot).text


@pytest.mark.parametrize("name", machines.NAMES)
def test_every_recorded_machine_names_its_sources(name):
    machine = json.loads((machines.FOLDER / f"{name}.json").read_text())
    assert machine["sources"] and machine["about"] and "placeholders" in machine


def test_doc_01_gpu_named_by_uuid(machine_snapshot):
    wanted = machines.load("h100_x8_nvswitch")["gpus"][5]["uuid"]
    snapshot = machine_snapshot("h100_x8_nvswitch", {"CUDA_VISIBLE_DEVICES": wanted})
    (gpu,) = snapshot.visible
    assert (gpu.uuid, gpu.cuda_index, gpu.nvml_index, gpu.pci) == (wanted, 0, 5, "0000:ab:00.0")
    assert snapshot.problems == ()


def test_doc_01_beginning_of_a_uuid_is_enough(machine_snapshot):
    wanted = machines.load("h100_x8_nvswitch")["gpus"][2]["uuid"]
    (gpu,) = machine_snapshot("h100_x8_nvswitch", {"CUDA_VISIBLE_DEVICES": wanted[:14]}).visible
    assert gpu.uuid == wanted


def test_doc_01_mig_slice_named_by_uuid(machine_snapshot):
    wanted = machines.load("mig_a100")["gpus"][0]["slices"][2]["uuid"]
    snapshot = machine_snapshot("mig_a100", {"CUDA_VISIBLE_DEVICES": wanted})
    assert [gpu.uuid for gpu in snapshot.visible] == [wanted]
    verdict, found, code = findings_of(snapshot)
    assert verdict.reason == "one-gpu" and code == 0
    assert "no peer access" in found["mig-slices"].text and "CPU backend" in found["mig-slices"].fix


def test_doc_02_memory_and_sms_are_those_of_the_slice(machine_snapshot):
    machine = machines.load("mig_a100")
    wanted = machine["gpus"][0]["slices"][0]
    (gpu,) = machine_snapshot(machine, {"CUDA_VISIBLE_DEVICES": wanted["uuid"]}).visible
    assert gpu.memory_bytes == wanted["memory_mib"] << 20
    assert (gpu.sm_count, gpu.name) == (14, "NVIDIA A100-SXM4-80GB MIG 1g.20gb")
    assert gpu.mig_parent == machine["gpus"][0]["uuid"]


def test_doc_04_cuda_and_nvml_count_differently(machine_snapshot):
    snapshot = machine_snapshot("mixed_models")
    first = snapshot.visible[0]
    assert (first.cuda_index, first.nvml_index, first.name, first.arch) == (0, 1, "NVIDIA GeForce RTX 4090", "sm_89")
    _, found, _ = findings_of(snapshot)
    assert "CUDA's 0 is nvidia-smi's 1" in found["order-differs"].text
    assert "CUDA_DEVICE_ORDER=PCI_BUS_ID" in found["order-differs"].fix


def test_doc_04_same_order_raises_no_warning(machine_snapshot):
    snapshot = machine_snapshot("mixed_models", {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"})
    assert [gpu.cuda_index for gpu in snapshot.visible] == [gpu.nvml_index for gpu in snapshot.visible]
    assert "order-differs" not in findings_of(snapshot)[1]


def test_doc_04_a_number_in_the_variable_is_cudas_number(machine_snapshot):
    snapshot = machine_snapshot("mixed_models", {"CUDA_VISIBLE_DEVICES": "0"})
    assert [gpu.nvml_index for gpu in snapshot.visible] == [1]
    assert "order-differs" in findings_of(snapshot)[1]


def test_doc_04_the_protocol_follows_the_gpu_in_use(machine_snapshot):
    """The two RTX 4090 (CUDA 0 and 1) reach each other; NVML 0 and 1 would be a 5090 and a 4090, which do not."""
    snapshot = machine_snapshot("mixed_models")
    probes = machines.passing(snapshot)
    assert decide(snapshot, probes, world=2).protocol == "pcie"
    by_nvml = [gpu.uuid for gpu in sorted(snapshot.gpus, key=lambda g: g.nvml_index)[:2]]
    assert decide(snapshot, probes, uuids=by_nvml).protocol == "staged"


@pytest.mark.parametrize(("value", "entry"), [("8", "8"), ("0,9", "9")])
def test_doc_05_entry_that_does_not_exist(machine_snapshot, value, entry):
    snapshot = machine_snapshot("h100_x8_nvswitch", {"CUDA_VISIBLE_DEVICES": value})
    _, found, code = findings_of(snapshot)
    text = found["visible-bad-entry"].text
    assert code == 2
    for part in ("CUDA_VISIBLE_DEVICES", repr(value), repr(entry), "0 to 7", "ignores it and all entries after it"):
        assert part in text
    assert len(snapshot.visible) == value.count(",")


@pytest.mark.parametrize("value", ["", " ", ",", "-1"])
def test_doc_06_hidden_gpus_are_no_broken_installation(machine_snapshot, value):
    verdict, found, code = findings_of(machine_snapshot("h100_x8_nvswitch", {"CUDA_VISIBLE_DEVICES": value}))
    assert (verdict.reason, verdict.protocol, code) == ("gpus-hidden", "shm", 0)
    assert "hidden by CUDA_VISIBLE_DEVICES" in found["visible-empty"].text


def test_doc_07_no_nvml_library_but_cuda_works(machine_snapshot):
    snapshot = machine_snapshot("container_without_nvml")
    assert (snapshot.host.nvml_state, snapshot.host.cuda_state) == ("nvml-library-missing", "ok")
    assert [gpu.arch for gpu in snapshot.visible] == ["sm_80", "sm_80"]  # from CUDA
    verdict, found, code = findings_of(snapshot)
    assert found["nvml-library-missing"].level == "warn" and code == 1
    assert (verdict.protocol, verdict.reason) == ("staged", "unverified")
    verdict, _, code = findings_of(snapshot, machines.passing(snapshot))
    assert (verdict.protocol, verdict.pairs[0].reason, code) == ("pcie", "pair-peer-link-unknown", 1)


def test_doc_07_binding_not_installed(machine_snapshot, tmp_path):
    def no_module():
        raise ModuleNotFoundError("No module named 'pynvml'")

    machine = machines.load("container_without_nvml")
    snapshot = take_snapshot({}, files=machines.Files(machines.file_tree(machine, tmp_path)),
                             nvml=lambda: open_nvml(load_binding=no_module),
                             cuda=lambda env: machines.cuda_answers(machine, env))
    _, found, code = findings_of(snapshot)
    assert "nvidia-ml-py" in found["nvml-binding-missing"].fix and code == 1
    assert len(snapshot.visible) == 2


def test_doc_08_wsl_library_is_tried_after_code_9(machine_snapshot):
    snapshot = machine_snapshot("wsl_3090_x2")
    assert snapshot.host.wsl and snapshot.host.nvml_state == "ok"
    assert snapshot.host.nvml_library == "/usr/lib/wsl/lib/libnvidia-ml.so.1"
    verdict, found, _ = findings_of(snapshot)
    assert "WSL" in found["wsl-limited"].text
    assert len(snapshot.visible) == 2 and verdict.protocol == "staged"


def test_doc_08_stale_function_pointers_are_dropped():
    fake = FakeNvml(machines.load("wsl_3090_x2"))
    assert machines.opened(fake).usable
    assert fake._nvmlGetFunctionPointer_cache == {}


def test_doc_08_no_library_answers(machine_snapshot):
    machine = machines.load("wsl_3090_x2")
    machine["nvml"]["libraries"].pop("/usr/lib/wsl/lib/libnvidia-ml.so.1")
    snapshot = machine_snapshot(machine)
    _, found, code = findings_of(snapshot)
    assert "/usr/lib/wsl/lib" in found["nvml-driver-not-loaded"].fix and code == 1
    assert len(snapshot.visible) == 2  # CUDA still shows them


def test_doc_09_driver_and_library_differ(machine_snapshot):
    snapshot = machine_snapshot("driver_mismatch")
    assert snapshot.host.driver_module == "580.173.02"
    verdict, found, code = findings_of(snapshot)
    assert code == 2  # a machine without GPU gets 0
    assert "580.173.02" in found["nvml-version-mismatch"].text and "reboot" in found["nvml-version-mismatch"].fix
    assert "\n" not in found["nvml-version-mismatch"].text
    assert verdict.protocol == "shm"


def test_doc_09_mismatch_with_working_cuda_is_a_warning(machine_snapshot):
    machine = machines.load("container_without_nvml")
    machine["nvml"]["libraries"] = {"libnvidia-ml.so.1": "LibRmVersionMismatch"}
    _, found, code = findings_of(machine_snapshot(machine))
    assert found["nvml-version-mismatch"].level == "warn" and code == 1


def test_doc_12_slots_that_are_not_wired_are_not_down(machine_snapshot):
    machine = machines.load("h100_x8_nvswitch")
    for gpu in machine["gpus"]:
        gpu["links"] += [None] * 18  # 36 slots, 18 real
    snapshot = machine_snapshot(machine)
    assert {(gpu.nvlink_up, gpu.nvlink_slots) for gpu in snapshot.gpus} == {(18, 18)}
    assert "nvlink-down" not in findings_of(snapshot)[1]
    assert not any("NvLinkState" in call for call in snapshot.failed_calls)


def test_doc_12_a_link_that_is_down_is_told(machine_snapshot):
    machine = machines.load("h100_x8_nvswitch")
    machine["gpus"][3]["links"][0]["up"] = False
    _, found, _ = findings_of(machine_snapshot(machine))
    assert "1 of 18" in found["nvlink-down"].text and "GPU 3" in found["nvlink-down"].text


def test_doc_21_memory_query_not_supported(machine_snapshot):
    machine = machines.load("h100_x8_nvswitch")
    machine["nvml"] = {"errors": {"nvmlDeviceGetMemoryInfo": "NotSupported"}}
    snapshot = machine_snapshot(machine)
    assert snapshot.gpus[0].memory_bytes == 81559 << 20  # CUDA's total
    for answers in machine["gpus"]:
        answers.pop("memory_mib")
    _, found, code = findings_of(machine_snapshot(machine), None)
    assert "memory size unknown" in found["memory-unknown"].text


def test_doc_21_old_binding_without_the_second_memory_query(machine_snapshot):
    machine = machines.load("rtx4090_x2_no_p2p")
    machine["nvml"] = {"errors": {"nvmlDeviceGetMemoryInfo": "NotSupported"}}
    fake = FakeNvml(machine)
    fake.nvmlMemory_v2 = None
    assert len(machine_snapshot(machine, binding=fake).gpus) == 2


ONE_GPU_QUERIES = [name for name in dir(FakeNvml) if name.startswith(("nvmlDeviceGet", "nvmlSystemGet"))
                   and name not in ("nvmlDeviceGetCount", "nvmlDeviceGetHandleByIndex")]


@pytest.mark.parametrize("error", ["NotSupported", "NoPermission", "Unknown"])
@pytest.mark.parametrize("query", ONE_GPU_QUERIES)
def test_doc_21_any_single_query_may_fail(machine_snapshot, query, error):
    machine = machines.load("nvlink_bridges_two_pairs")
    machine["nvml"] = {"errors": {query: error}}
    snapshot = machine_snapshot(machine)
    assert len(snapshot.visible) == 4
    assert decide(snapshot, machines.passing(snapshot)).protocol in ("pcie", "staged")


@pytest.mark.parametrize("query", ONE_GPU_QUERIES)
def test_doc_22_symbols_missing_in_an_old_binding(machine_snapshot, query):
    machine = machines.load("nvlink_bridges_two_pairs")
    snapshot = machine_snapshot(machine, binding=FakeNvml(machine, missing=(query,)))
    assert len(snapshot.visible) == 4


def test_doc_22_import_warns_nothing_and_loads_no_nvml():
    code = ("import sys, moe_tk, moe_tk.topology\n"
            "from moe_tk.topology import decide, take_snapshot\n"
            "assert 'torch' not in sys.modules and 'pynvml' not in sys.modules, sorted(sys.modules)")
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=60)


def test_doc_23_snapshot_loads_no_cuda_into_this_process():
    code = ("import os\n"
            "from moe_tk.topology import take_snapshot\n"
            "take_snapshot(os.environ)\n"
            "maps = open('/proc/self/maps').read()\n"
            "assert 'libcuda.so' not in maps and 'libcudart' not in maps")
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_doc_23_bad_fork_is_told(monkeypatch):
    import types

    from moe_tk import diagnose

    forked = types.ModuleType("torch")
    forked.__spec__ = importlib.machinery.ModuleSpec("torch", None)
    forked.cuda = types.SimpleNamespace(_is_in_bad_fork=lambda: True)
    monkeypatch.setitem(sys.modules, "torch", forked)
    snapshot = diagnose.read_machine()
    _, found, code = findings_of(snapshot)
    assert "spawn" in found["bad-fork"].fix and code == 2


def test_cuda_child_that_hangs_is_killed(monkeypatch, tmp_path):
    slow = tmp_path / "cuda_child.py"
    slow.write_text("import time\ntime.sleep(60)\n")
    monkeypatch.setattr("moe_tk.topology.reader.__file__", str(tmp_path / "reader.py"))
    answer = query_cuda(os.environ, limit_s=0.5)
    assert answer["state"] == "failed" and "0.5 s" in answer["error"]


def test_visible_resolution_follows_cuda():
    uuids = ["GPU-aaaa1111", "GPU-aaaa2222", "MIG-bbbb"]
    assert resolve_visible(None, uuids, 2).state == "unset"
    assert resolve_visible("1,0", uuids, 2).entries == ("1", "0")
    assert resolve_visible("GPU-aaaa1", uuids, 2).uuids == ("GPU-aaaa1111",)
    assert resolve_visible("GPU-aaaa", uuids, 2).why == "2 GPUs have UUIDs that begin so"
    assert resolve_visible("0,0", uuids, 2).why == "it is named twice"
    assert resolve_visible("gpu0", uuids, 2).why.startswith("neither")
    assert resolve_visible("0,,1", uuids, 2).bad == ""
    assert resolve_visible("5", uuids, None).state == "ok"  # nobody could count
