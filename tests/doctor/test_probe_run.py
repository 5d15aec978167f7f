"""Killable children: a probe that hangs, dies, talks nonsense or never starts costs its limit and ends no report."""

from __future__ import annotations

import os
import sys
import time

import pytest

from moe_tk.topology.child import run_child
from moe_tk.topology.probe import ProbesNotRun, run_probes
from moe_tk.topology.probe_plan import full_steps, pairs_of, quick_steps
from moe_tk.topology.probe_run import Limits, run_steps
from moe_tk.topology.verdict import decide

# A child without GPUs that behaves as the step tells it: {"act": "ok" | "hang" | "die" | "error" | "noise"}.
FAKE_CHILD = """
import json, os, sys, time
plan = json.load(sys.stdin)
ok = {"verify": {"status": "ok"}, "signal": {"status": "ok", "value": 1.3},
      "atomics": {"status": "ok", "sent": 5, "counted": 5},
      "rate": {"gbs": [10.0] * 8}, "copy": {"gbs": [20.0] * 8},
      "gemm": {"parked_us": [100.0] * 4, "gemm_us": [110.0] * 4, "gbs": [5.0] * 4}}
acts = json.loads(os.environ.get("FAKE_ACTS", "{}"))
if acts.get("start") == "hang": time.sleep(60)
if acts.get("start") == "die": sys.exit("no driver today")
def say(**event): print(json.dumps(event), flush=True)
say(ready=True)
for number, step in plan["steps"]:
    key = f"{step['do']} {step.get('kind', '')} {step.get('src', '')}{step.get('dst', '')}"
    act = next((what for name, what in acts.items() if key.startswith(name)), "ok")
    say(begin=number)
    if act == "hang": time.sleep(60)
    if act == "die": os.kill(os.getpid(), 11)
    if act == "noise": print("some library says hello", flush=True)
    if act == "error": say(end=number, error="cudaErrorIllegalAddress (an illegal address)"); break
    if act == "refuse": say(end=number, error="GPU 0 cannot map GPU 1 (no peer access)"); continue
    if act == "bad":
        say(end=number, result={"status": "mismatch", "offset": 4096, "seen": "0xa5", "wanted": "0x17", "bad_words": 2})
        continue
    count = len(step.get("movers", step.get("jobs", [])))
    result = {k: v[:count] if k == "gbs" else v for k, v in ok[step["do"]].items()}
    say(end=number, result=result)
say(done=True)
"""


@pytest.fixture
def probe(tmp_path, machine_snapshot):
    """Probes of a recorded machine in the fake child, which misbehaves as told."""
    script = tmp_path / "fake_child.py"
    script.write_text(FAKE_CHILD)

    def run(machine="nvlink_bridges_two_pairs", world=2, depth="quick", limits=Limits(0.6, 1.5, 20.0), **acts):  # noqa: B008
        import json

        snapshot = machine_snapshot(machine)
        uuids = [gpu.uuid for gpu in snapshot.visible][:world]
        acts = {name.replace("_", " "): act for name, act in acts.items()}
        environ = {**os.environ, "FAKE_ACTS": json.dumps(acts)}
        probes = run_probes(snapshot, uuids, environ, depth=depth, limits=limits, library="none",
                            command=[sys.executable, str(script)], torch_cuda=True)
        return snapshot, uuids, probes

    return run


def test_all_probes_pass(probe):
    snapshot, uuids, probes = probe()
    assert {check.status for check in probes.checks} == {"ok"}
    assert decide(snapshot, probes, uuids=uuids).protocol == "nvlink"
    assert probes.latency_us(*uuids) == 1.3


def test_doc_17_a_probe_that_hangs_is_killed_and_named(probe):
    began = time.monotonic()
    snapshot, uuids, probes = probe(world=3, verify_push_01="hang")
    assert time.monotonic() - began < 10
    verdict = decide(snapshot, probes, uuids=uuids)
    reasons = {pair.inputs["pair"]: pair.reason for pair in verdict.pairs}
    assert reasons["GPU 0 - GPU 1"] == "pair-timeout"  # which pair
    assert reasons["GPU 0 - GPU 2"] == reasons["GPU 1 - GPU 2"] == "pair-pcie"  # the others were still probed
    assert verdict.protocol == "staged"
    assert any(check.status == "skipped" and "hung" in check.detail for check in probes.checks)


def test_doc_17_total_time_is_bounded(probe):
    began = time.monotonic()
    snapshot, uuids, probes = probe(world=4, limits=Limits(0.5, 1.5, 2.0), verify="hang")
    assert time.monotonic() - began < 2.0 + 0.5 + 3.0
    assert probes.limit_s == 0.5 and probes.seconds < 6
    assert decide(snapshot, probes, uuids=uuids).protocol == "staged"


def test_the_end_of_all_time_is_no_proof_against_a_pair(probe):
    """A GEMM may take four times the limit of a step; killed before that, it did not hang."""
    snapshot, uuids, probes = probe(depth="full", limits=Limits(1.0, 5.0, 1.5), gemm="hang")
    assert not [note for note in probes.notes if "killed" in note or "hung" in note]
    assert [note for note in probes.notes if note.startswith("GEMM") and "no time left (limit 1.5 s in all)" in note]
    assert decide(snapshot, probes, uuids=uuids).protocol == "nvlink"


def test_doc_17_a_child_that_never_starts(probe):
    with pytest.raises(ProbesNotRun, match="did not start within 1.5 s"):
        probe(start="hang")
    with pytest.raises(ProbesNotRun, match="no driver today"):
        probe(start="die")


def test_a_child_that_dies_is_an_error_of_that_pair(probe):
    snapshot, uuids, probes = probe(verify_pull_10="die")
    verdict = decide(snapshot, probes, uuids=uuids)
    assert verdict.pairs[0].reason == "pair-probe-failed" and verdict.protocol == "staged"


def test_an_error_is_told_and_the_rest_goes_on(probe):
    snapshot, uuids, probes = probe(world=3, verify_push_02="error")
    reasons = {pair.inputs["pair"]: pair.reason for pair in decide(snapshot, probes, uuids=uuids).pairs}
    assert reasons == {"GPU 0 - GPU 1": "pair-nvlink", "GPU 0 - GPU 2": "pair-probe-failed",
                       "GPU 1 - GPU 2": "pair-pcie"}
    assert any("illegal address" in check.detail for check in probes.checks)


def test_sym_04_a_mapping_that_is_refused_is_no_peer_access(probe):
    """The library says "GPU 0 cannot map GPU 1 (no peer access)", not CUDA's "invalid device ordinal"."""
    snapshot, uuids, probes = probe(verify="refuse", signal="refuse", atomics="refuse")
    assert decide(snapshot, probes, uuids=uuids).pairs[0].reason == "pair-no-peer"
    details = {check.detail for check in probes.checks if check.kind == "push"}
    assert details == {"GPU 0 cannot map GPU 1 (no peer access)"}


def test_wrong_data_carries_offset_and_values(probe):
    snapshot, uuids, probes = probe(verify_push_01="bad")
    bad = next(check for check in probes.checks if check.status == "mismatch")
    assert (bad.offset, bad.seen, bad.wanted, bad.bad_words) == (4096, "0xa5", "0x17", 2)
    assert decide(snapshot, probes, uuids=uuids).reason == "some-pair-vetoed"


def test_noise_on_stdout_is_ignored(probe):
    _, _, probes = probe(verify="noise")
    assert {check.status for check in probes.checks} == {"ok"}


def test_full_probes_give_rates_and_interference(probe):
    snapshot, uuids, probes = probe(machine="rtx_pro_5000_x4", depth="full", limits=Limits(5.0, 5.0, 60.0))
    assert probes.best_rate(*uuids, load="alone", op="push").gbs == 10.0
    assert probes.best_rate(uuids[0], "all", load="all", op="push") is not None  # of two, both ways is all
    assert probes.best_rate(uuids[0], "host", load="duplex", op="pull") is not None
    assert probes.best_rate(*uuids, engine="copy-engine").gbs == 20.0
    assert probes.interference[0].slowdown == pytest.approx(1.1)
    assert decide(snapshot, probes, uuids=uuids).protocol in ("pcie", "staged")


def test_slices_are_not_probed(machine_snapshot):
    snapshot = machine_snapshot("mig_a100")
    with pytest.raises(ProbesNotRun, match="MIG"):
        run_probes(snapshot, [snapshot.visible[0].uuid], {}, library="none")


def test_plan_covers_every_pair_both_ways():
    linked = [(0, 1), (0, 2), (1, 2)]
    steps = quick_steps(3, [True] * 3, linked)
    seen = {(s["src"], s["dst"], s["kind"], s["engine"]) for s in steps if s["do"] == "verify"}
    assert len(seen) == 6 * 2 * 2
    everything = full_steps(3, [True] * 3, linked, 132, True)
    assert everything[: len(steps)] == steps  # correctness comes first
    for step in everything:
        assert pairs_of(step) or step["do"] == "gemm"
    assert {m["sms"] for s in everything if s["do"] == "rate" and s["load"] == "all" for m in s["movers"]} >= {1, 132}


def test_plan_without_bulk_copies_and_without_links():
    steps = full_steps(2, [False, False], [], 84, False)
    assert all(mover["engine"] == "words" for step in steps for mover in step.get("movers", ()))
    assert not [step for step in steps if step["do"] in ("verify", "signal", "gemm")]
    assert [step for step in steps if step["do"] == "copy"]  # host memory is still measured


def test_run_steps_always_answers_for_every_step(tmp_path):
    script = tmp_path / "silent.py"
    script.write_text("import sys; sys.stdin.read()")
    steps = quick_steps(2, [True, True], [(0, 1)])
    results = run_steps(steps, library="none", devices=2, environ=os.environ, command=[sys.executable, str(script)])
    assert len(results) == len(steps) and {result.how for result in results} == {"skipped"}


def test_child_is_killed_with_its_children(tmp_path):
    marker = tmp_path / "pid"
    code = (f"import subprocess, sys, time\np = subprocess.Popen([sys.executable, '-c', 'import time; "
            f"time.sleep(60)'])\n"
            f"open({str(marker)!r}, 'w').write(str(p.pid))\ntime.sleep(60)")
    ended = run_child([sys.executable, "-c", code], 1.5)
    assert ended.how == "timeout" and ended.seconds < 5
    pid = int(marker.read_text())
    for _ in range(50):
        try:
            state = open(f"/proc/{pid}/stat").read().rsplit(")", 1)[1].split()[0]
        except FileNotFoundError:
            return
        if state == "Z":
            return
        time.sleep(0.1)
    pytest.fail("the grandchild is still running")
