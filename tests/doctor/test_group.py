"""moe_tk.doctor(group): ranks exchange UUIDs, and every rank gets the same report or the same error."""

from __future__ import annotations

import multiprocessing
import queue
import subprocess
import sys
import tempfile

import group_worker
import machines
import pytest

import moe_tk
from moe_tk.errors import ArgumentError
from moe_tk.runtime.launcher import PRELOAD

LIMIT_S = 120


@pytest.fixture
def ranks(tmp_path):
    """Run moe_tk.doctor on every rank of a group; {rank: (how, what)} under a watchdog."""
    server = multiprocessing.get_context("forkserver")  # ranks are forked from a process that has imported torch once
    server.set_forkserver_preload(list(PRELOAD))

    def run(machine, environs, device=None, **how):
        results = server.Queue()
        folder = tempfile.mkdtemp(dir=tmp_path)  # a file store must be new for every group
        world = len(environs)
        device = device or [None] * world
        workers = [server.Process(target=group_worker.rank_main,
                                 args=(rank, world, folder, machine, environs, device, how, results))
                   for rank in range(world)]
        for worker in workers:
            worker.start()
        try:
            answers = [results.get(timeout=LIMIT_S) for _ in workers]
        except queue.Empty:
            pytest.fail(f"a rank did not answer within {LIMIT_S} s")
        finally:
            for worker in workers:
                worker.join(10)
                worker.kill()
        return {rank: (how, what) for rank, how, what in answers}

    return run


def test_doc_11_same_report_on_all_ranks_with_one_card_each(ranks):
    alone = ranks("nvlink_bridges_two_pairs", [{"CUDA_VISIBLE_DEVICES": str(i)} for i in range(4)])
    assert [alone[rank][0] for rank in range(4)] == ["ok"] * 4, alone
    reports = [alone[rank][1] for rank in range(4)]
    assert all(report == reports[0] for report in reports)
    verdict = reports[0].verdict
    assert verdict.uuids == tuple(gpu["uuid"] for gpu in machines.load("nvlink_bridges_two_pairs")["gpus"])
    assert verdict.islands == (("GPU 0", "GPU 1"), ("GPU 2", "GPU 3"))
    everything = ranks("nvlink_bridges_two_pairs", [{} for _ in range(4)], device=[0, 1, 2, 3])
    assert everything[2][1].verdict == verdict


def test_doc_25_two_ranks_on_one_gpu_raise_on_both(ranks):
    wanted = machines.load("h100_x8_nvswitch")["gpus"][3]["uuid"]
    answers = ranks("h100_x8_nvswitch", [{"CUDA_VISIBLE_DEVICES": "3"}, {}], device=[0, 3])
    for rank in (0, 1):
        how, text = answers[rank]
        assert how == "TopologyError" and "ranks 0 and 1" in text and wanted in text


def test_doc_25_two_slices_of_one_card_raise(ranks):
    machine = machines.load("mig_a100")
    slices = [machine["gpus"][0]["slices"][i]["uuid"] for i in range(2)]
    answers = ranks("mig_a100", [{"CUDA_VISIBLE_DEVICES": uuid} for uuid in slices])
    assert all(how == "TopologyError" and "two MIG slices" in text and machine["gpus"][0]["uuid"] in text
               for how, text in answers.values())


def test_an_error_on_rank_0_reaches_all(ranks):
    answers = ranks("h100_x8_nvswitch", [{}, {}], device=[0, 1], protocol="pigeons")
    assert {how for how, _ in answers.values()} == {"ArgumentError"}
    assert all("pigeons" in text for _, text in answers.values())


def test_a_rank_that_names_no_device_is_told(machine_snapshot):
    from moe_tk.diagnose import _own_uuid

    snapshot = machine_snapshot("h100_x8_nvswitch")
    with pytest.raises(ArgumentError, match="8 GPUs are visible and nothing says which one"):
        _own_uuid(snapshot, None)
    with pytest.raises(ArgumentError, match="device 9 does not exist"):
        _own_uuid(snapshot, 9)


def test_local_rank_names_the_device(machine_snapshot, monkeypatch):
    from moe_tk.diagnose import _own_uuid

    monkeypatch.setenv("LOCAL_RANK", "5")
    assert _own_uuid(machine_snapshot("h100_x8_nvswitch"), None) == machines.load("h100_x8_nvswitch")["gpus"][5]["uuid"]


def test_without_a_group_it_is_this_machine(machine_snapshot, monkeypatch, cache_dir):
    monkeypatch.setattr("moe_tk.diagnose.read_machine", lambda environ=None: machine_snapshot("rtx4090_x2_no_p2p"))
    report = moe_tk.doctor()
    assert report.protocol == "staged" and report.exit_code == 0


def test_doctor_stays_a_function_after_its_modules_are_imported():
    code = ("import moe_tk.diagnose, moe_tk.cli.doctor, moe_tk.topology.report\nimport moe_tk\nassert "
            "callable(moe_tk.doctor)")
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
