"""The verdict: which protocol for which pairs and groups, its reason, and that the quoted reason is true."""

from __future__ import annotations

import dataclasses

import machines
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_tk.diagnose import check_ranks
from moe_tk.errors import ArgumentError, TopologyError
from moe_tk.topology.facts import GpuFacts, HostFacts, PairFacts, Problem, TopologySnapshot
from moe_tk.topology.findings import find
from moe_tk.topology.groups import rank_groups
from moe_tk.topology.probes import HOST, Check, ProbeResults, Rate
from moe_tk.topology.reasons import GROUP_REASONS, PAIR_REASONS, REASONS
from moe_tk.topology.report import make_report
from moe_tk.topology.verdict import decide, decide_cpu
from moe_tk.topology.wishes import PROTOCOLS


def uuids_of(snapshot, *cuda_indices):
    by_index = {gpu.cuda_index: gpu.uuid for gpu in snapshot.gpus}
    return [by_index[index] for index in cuda_indices]


def test_no_gpu_is_the_cpu_backend():
    verdict = decide(TopologySnapshot())
    assert (verdict.protocol, verdict.reason, verdict.usable) == ("shm", "no-gpu", True)


def test_tensors_on_the_cpu_need_no_snapshot(monkeypatch):
    monkeypatch.delenv("MOE_TK_PROTOCOL", raising=False)
    for asked, reason in ((None, "cpu-tensors"), ("auto", "cpu-tensors"), ("shm", "cpu-forced")):
        verdict = decide_cpu(asked, world=2).require()
        assert (verdict.protocol, verdict.reason, verdict.world, verdict.natural) == ("shm", reason, 2, "shm")
        assert REASONS[reason].holds(verdict.inputs)
    for asked in ("nvlink", "pcie", "staged"):
        with pytest.raises(TopologyError, match=f"protocol '{asked}' moves data between GPUs.*by the argument protocol"):
            decide_cpu(asked).require()


def test_a_wish_is_heard_in_one_place_argument_before_variable(monkeypatch):
    monkeypatch.setenv("MOE_TK_PROTOCOL", "pcie")
    assert decide_cpu("shm").forced_by == "the argument protocol"
    assert decide_cpu("auto").forced_by == "MOE_TK_PROTOCOL" and not decide_cpu().usable
    monkeypatch.setenv("MOE_TK_PROTOCOL", "carrier pigeon")
    with pytest.raises(ArgumentError, match="MOE_TK_PROTOCOL is 'carrier pigeon', wanted one of auto, nvlink, pcie, staged, shm"):
        decide_cpu()
    with pytest.raises(ArgumentError, match="^protocol is 'rdma', wanted"):
        decide_cpu("rdma")
    with pytest.raises(ArgumentError, match="^protocol is 'rdma', wanted"):
        decide(TopologySnapshot(), override="rdma")


@pytest.mark.parametrize("asked", ["auto", *PROTOCOLS])
def test_the_plan_of_a_layer_is_the_verdict(asked, monkeypatch):
    """One function, one truth: planner and doctor cannot disagree about a layer on the CPU."""
    from moe_tk.planner import make_plan

    monkeypatch.delenv("MOE_TK_PROTOCOL", raising=False)
    verdict = decide_cpu(asked)
    sizes = {"pattern": "auto", "max_tokens": 8, "cores": 2, "world": 1}
    if verdict.usable:
        plan = make_plan(protocol=asked, **sizes)
        assert plan.protocol == verdict.protocol and f"protocol shm: {verdict.text}" in plan.explain()
    else:
        with pytest.raises(TopologyError) as caught:
            make_plan(protocol=asked, **sizes)
        assert str(caught.value).startswith(verdict.text)


def test_a_claim_alone_is_not_enough(machine_snapshot):
    verdict = decide(machine_snapshot("h100_x8_nvswitch"))
    assert (verdict.protocol, verdict.expected, verdict.verified) == ("staged", "nvlink", False)


def test_doc_10_bridges_on_two_pairs(machine_snapshot):
    """Every GPU has active lanes, but only (0,1) and (2,3) are connected."""
    snapshot = machine_snapshot("nvlink_bridges_two_pairs")
    assert {gpu.nvlink_up for gpu in snapshot.gpus} == {4}
    probes = machines.passing(snapshot)
    four = decide(snapshot, probes)
    assert (four.protocol, four.reason) == ("pcie", "nvlink-islands")
    assert four.islands == (("GPU 0", "GPU 1"), ("GPU 2", "GPU 3"))
    assert decide(snapshot, probes, uuids=uuids_of(snapshot, 0, 1)).protocol == "nvlink"
    assert decide(snapshot, probes, uuids=uuids_of(snapshot, 0, 2)).protocol == "pcie"


@pytest.mark.parametrize("how", ["status", "far ends"])
def test_doc_10_either_per_pair_query_is_enough(machine_snapshot, how):
    machine = machines.load("nvlink_bridges_two_pairs")
    if how == "status":  # far ends unreadable
        for gpu in machine["gpus"]:
            gpu["links"] = [{"version": 3} for _ in gpu["links"]]
    else:  # the status query fails
        machine["every_pair"].pop("nvlink")
        machine["pairs"] = {}
    snapshot = machine_snapshot(machine)
    linked = {(pair.a[4:6], pair.b[4:6]) for pair in snapshot.pairs if pair.nvlink}
    assert linked == {("00", "01"), ("02", "03")}
    assert {pair.nvlink for pair in snapshot.pairs} == {True, False}


def test_doc_11_one_visible_card_per_rank(machine_snapshot):
    """Each rank sees its own card as device 0; the group is judged by UUID, the same as if everybody saw all."""
    machine = machines.load("nvlink_bridges_two_pairs")
    own = [machine_snapshot(machine, {"CUDA_VISIBLE_DEVICES": str(i)}).visible[0].uuid for i in range(4)]
    assert len(set(own)) == 4
    everything = machine_snapshot(machine)
    again = machine_snapshot(machine, {"CUDA_VISIBLE_DEVICES": ",".join(own)})
    assert again.pairs == everything.pairs
    probes = machines.passing(everything)
    assert decide(again, probes, uuids=own) == decide(everything, probes, uuids=own)
    assert all(pair.a != pair.b for pair in decide(again, probes, uuids=own).pairs)


def test_doc_13_far_ends_are_switches(machine_snapshot):
    snapshot = machine_snapshot("h100_x8_nvswitch")
    assert {(pair.nvlink_links, pair.nvlink_via) for pair in snapshot.pairs} == {(18, "switch")}
    assert {gpu.fabric_state for gpu in snapshot.gpus} == {"completed"}
    assert decide(snapshot, machines.passing(snapshot)).protocol == "nvlink"


def test_doc_13_switches_without_the_pair_query(machine_snapshot):
    machine = machines.load("h100_x8_nvswitch")
    machine["every_pair"].pop("nvlink")
    snapshot = machine_snapshot(machine)
    assert {pair.nvlink for pair in snapshot.pairs} == {True}


def test_doc_13_two_fabrics_are_not_one(machine_snapshot):
    machine = machines.load("h100_x8_nvswitch")
    machine["every_pair"].pop("nvlink")
    for place, gpu in enumerate(machine["gpus"]):
        gpu["fabric"]["clique"] = place // 4
    snapshot = machine_snapshot(machine)
    verdict = decide(snapshot, machines.passing(snapshot))
    assert verdict.protocol == "pcie" and [len(island) for island in verdict.islands] == [4, 4]


def test_doc_13_fabric_that_is_not_set_up_is_told(machine_snapshot):
    machine = machines.load("h100_x8_nvswitch")
    machine["gpus"][0]["fabric"] = {"state": "in-progress"}
    snapshot = machine_snapshot(machine)
    found = {item.id: item for item in find(snapshot, None, decide(snapshot))}
    assert "in-progress" in found["fabric-not-ready"].text and "fabricmanager" in found["fabric-not-ready"].fix


def test_doc_14_two_islands(machine_snapshot):
    snapshot = machine_snapshot("nvlink_two_islands")
    probes = machines.passing(snapshot)
    eight = decide(snapshot, probes)
    assert (eight.protocol, eight.reason) == ("pcie", "nvlink-islands")
    assert [len(island) for island in eight.islands] == [4, 4]
    assert "{GPU 0, GPU 1, GPU 2, GPU 3}" in eight.text and "{GPU 4, GPU 5, GPU 6, GPU 7}" in eight.text
    assert decide(snapshot, probes, world=4).protocol == "nvlink"
    assert decide(snapshot, probes, uuids=uuids_of(snapshot, 0, 1, 4, 5)).protocol == "pcie"


@pytest.mark.parametrize(("status", "reason"), [("mismatch", "pair-mismatch"), ("timeout", "pair-timeout"),
                                                ("error", "pair-probe-failed")])
@pytest.mark.parametrize("direction", [0, 1])
def test_doc_15_claimed_access_that_does_not_work(machine_snapshot, status, reason, direction):
    snapshot = machine_snapshot("rtx_pro_5000_x4")
    ends = uuids_of(snapshot, 2, 3)[::-1 if direction else 1]
    probes = machines.with_check(machines.passing(snapshot), *ends, status=status, offset=4096, seen="0xa5",
                                 wanted="0x17", bad_words=3, detail="3 words wrong")
    verdict = decide(snapshot, probes)
    assert (verdict.protocol, verdict.reason, verdict.level) == ("staged", "some-pair-vetoed", "warn")
    assert "GPU 2 - GPU 3" in verdict.text
    assert [pair.reason for pair in verdict.pairs].count(reason) == 1
    assert decide(snapshot, probes, uuids=uuids_of(snapshot, 0, 1)).protocol == "pcie"


def test_doc_15_veto_names_pair_offset_cause_and_command(machine_snapshot):
    snapshot = machine_snapshot("rtx_pro_5000_x4")
    one, other = uuids_of(snapshot, 0, 1)
    probes = machines.with_check(machines.passing(snapshot), one, other, status="mismatch", offset=4096, seen="0xa5",
                                 wanted="0x17", bad_words=3)

    def told(**host):
        changed = dataclasses.replace(snapshot, host=dataclasses.replace(snapshot.host, **host))
        (item, *_) = [i for i in find(changed, probes, decide(changed, probes)) if i.id == "probe-mismatch"]
        return item

    for part in ("GPU 0 -> GPU 1", "byte 4096", "0x17", "0xa5"):
        assert part in told().text
    assert "ACS redirect on 0000:16:01.0" in told(acs_redirect=("0000:16:01.0",)).text
    assert "acsctl" in told(acs_redirect=("0000:16:01.0",)).fix
    assert "IOMMU" in told(iommu="translating", acs_redirect=()).text
    assert "iommu" in told(iommu="translating", acs_redirect=()).fix
    assert "the driver" in told(iommu="off", acs_redirect=(), virtual_machine="").text


def test_doc_20_host_memory_wins_where_it_is_measured_to_be_faster(machine_snapshot):
    snapshot = machine_snapshot("rtx_pro_6000_x8_two_sockets")
    group = [gpu.uuid for gpu in snapshot.visible]
    rates = [Rate(one, other, "push", "words", "copy", 4, "alone", 50.0 if (i < 4) == (j < 4) else 3.0)
             for i, one in enumerate(group) for j, other in enumerate(group) if i != j]
    rates += [Rate(uuid, HOST, op, "words", "copy", 4, "duplex", 10.0) for uuid in group for op in ("push", "pull")]
    probes = machines.passing(snapshot, rates=tuple(rates))
    verdict = decide(snapshot, probes)
    assert (verdict.protocol, verdict.reason) == ("staged", "some-pair-slower")
    slow = next(pair for pair in verdict.pairs if pair.reason == "pair-host-faster")
    assert (slow.inputs["peer_gbs"], slow.inputs["staged_gbs"]) == (3.0, 10.0)
    assert "3 GB/s" in slow.text and "10 GB/s" in slow.text
    report = make_report(snapshot, probes)
    times = {item.protocol: item.seconds for item in report.exchanges}
    assert times["pcie"] > times["staged"]  # both numbers are shown
    assert decide(snapshot, probes, world=4).protocol == "pcie"
    forced = decide(snapshot, probes, override="pcie", override_by="MOE_TK_PROTOCOL")
    assert forced.protocol == "pcie" and forced.usable and "MOE_TK_PROTOCOL" in forced.text


def test_doc_20_all_to_all_decides_when_it_was_measured(machine_snapshot):
    snapshot = machine_snapshot("rtx_pro_5000_x4")
    group = [gpu.uuid for gpu in snapshot.visible]
    rates = [Rate(uuid, "all", "push", "words", "copy", 4, "all", 9.0) for uuid in group]
    rates += [Rate(uuid, HOST, op, "words", "copy", 4, "all", 30.0) for uuid in group for op in ("push", "pull")]
    verdict = decide(snapshot, machines.passing(snapshot, rates=tuple(rates)))
    assert (verdict.protocol, verdict.reason) == ("staged", "host-faster")


def test_doc_24_multicast_gates_only_multicast(machine_snapshot):
    machine = machines.load("h100_x8_nvswitch")
    for gpu in machine["gpus"]:
        gpu["multicast"] = False
    snapshot = machine_snapshot(machine)
    verdict = decide(snapshot, machines.passing(snapshot), world=2)
    assert (verdict.protocol, verdict.multicast) == ("nvlink", False)
    assert "peer access is not affected" in verdict.multicast_why
    without = decide(machine_snapshot("rtx_pro_5000_x4"), machines.passing(machine_snapshot("rtx_pro_5000_x4")))
    assert (without.protocol, without.multicast) == ("pcie", False)
    with_it = machine_snapshot("h100_x8_nvswitch")
    assert decide(with_it, machines.passing(with_it)).multicast is True


def test_doc_25_two_ranks_on_one_gpu():
    cards = [{"uuid": "GPU-a", "parent": "", "boot_id": "b", "hostname": "h"},
             {"uuid": "GPU-b", "parent": "", "boot_id": "b", "hostname": "h"},
             {"uuid": "GPU-a", "parent": "", "boot_id": "b", "hostname": "h"}]
    with pytest.raises(TopologyError, match="ranks 0 and 2 are on one GPU, GPU-a"):
        check_ranks(cards)
    check_ranks(cards, allow_shared=True)


def test_doc_25_two_slices_of_one_card():
    cards = [{"uuid": f"MIG-{i}", "parent": "GPU-p", "boot_id": "b", "hostname": "h"} for i in range(2)]
    with pytest.raises(TopologyError, match="ranks 0 and 1 are on two MIG slices of one GPU, GPU-p"):
        check_ranks(cards)


def test_doc_25_the_verdict_refuses_too(machine_snapshot):
    snapshot = machine_snapshot("h100_x8_nvswitch")
    one = snapshot.visible[3].uuid
    verdict = decide(snapshot, machines.passing(snapshot), uuids=[one, one])
    assert (verdict.usable, verdict.reason) == (False, "two-ranks-one-gpu")
    assert "ranks 0, 1" in verdict.text and "GPU 3" in verdict.text
    with pytest.raises(TopologyError, match="GPU 3"):
        verdict.require()
    assert decide(snapshot, None, uuids=[one, one], allow_shared=True).reason == "shared-gpu"


def test_ranks_on_two_machines_or_half_on_cpu():
    with pytest.raises(TopologyError, match="2 machines"):
        check_ranks([{"uuid": "a", "parent": "", "boot_id": "x", "hostname": "h1"},
                     {"uuid": "b", "parent": "", "boot_id": "y", "hostname": "h2"}])
    with pytest.raises(TopologyError, match="ranks 1 see no GPU"):
        check_ranks([{"uuid": "a", "parent": "", "boot_id": "x", "hostname": "h"},
                     {"uuid": None, "parent": "", "boot_id": "x", "hostname": "h"}])


def test_lost_increments_cost_nvlink_its_remote_atomics(machine_snapshot):
    snapshot = machine_snapshot("h100_x8_nvswitch")
    one, other = uuids_of(snapshot, 0, 1)
    probes = machines.passing(snapshot)
    lost = Check("atomics", one, other, "lost", sent=1000, counted=990)
    probes = dataclasses.replace(probes, checks=(*probes.checks, lost))
    verdict = decide(snapshot, probes, world=2)
    assert (verdict.protocol, verdict.pairs[0].reason) == ("pcie", "pair-nvlink-lossy")
    assert "10 of 1000" in verdict.pairs[0].text


@pytest.mark.parametrize("asked", PROTOCOLS)
def test_forcing_says_so(machine_snapshot, asked):
    snapshot = machine_snapshot("nvlink_bridges_two_pairs")
    verdict = decide(snapshot, machines.passing(snapshot), override=asked, override_by="MOE_TK_PROTOCOL")
    assert (verdict.protocol, verdict.natural, verdict.forced_by) == (asked, "pcie", "MOE_TK_PROTOCOL")
    assert verdict.reason == ("forced-against-evidence" if asked == "nvlink" else "forced")
    assert "MOE_TK_PROTOCOL" in verdict.text and "nvlink-islands" in verdict.text


def test_forcing_the_impossible(machine_snapshot):
    verdict = decide(machine_snapshot("rtx4090_x2_no_p2p"), override="pcie")
    assert (verdict.reason, verdict.usable) == ("forced-impossible", False)
    assert not decide(TopologySnapshot(), override="nvlink").usable
    with pytest.raises(ArgumentError, match="infiniband"):
        decide(TopologySnapshot(), override="infiniband")


def test_too_few_gpus(machine_snapshot):
    verdict = decide(machine_snapshot("rtx4090_x2_no_p2p"), world=4)
    assert (verdict.reason, verdict.usable) == ("too-few-gpus", False)
    assert "4" in verdict.text and "2 GPUs" in verdict.text


def test_groups_prefer_an_island_and_say_why(machine_snapshot):
    snapshot = machine_snapshot("nvlink_two_islands")
    ranked = rank_groups(snapshot, machines.passing(snapshot), 4)
    assert len(ranked) == 70
    assert {choice.labels for choice in ranked[:2]} == {("GPU 0", "GPU 1", "GPU 2", "GPU 3"),
                                                       ("GPU 4", "GPU 5", "GPU 6", "GPU 7")}
    assert ranked[0].protocol == "nvlink" and ranked[0].why == "6 x NV6"
    assert ranked[2].protocol == "pcie" and ranked[2].seconds > 4 * ranked[0].seconds


def test_groups_use_measured_rates(machine_snapshot):
    machine = machines.load("rtx_pro_5000_x4")
    snapshot = machine_snapshot(machine)
    probes = machines.passing(snapshot, rates=machines.recorded_rates(machine))
    report = make_report(snapshot, probes, group_size=4)
    assert (report.groups[0].origin, report.verdict.protocol) == ("measured", "pcie")
    bytes_each = report.shape.bytes_to_each_peer(4)
    assert report.groups[0].seconds == pytest.approx(3 * bytes_each / 50.9e9)


def test_groups_avoid_a_narrow_link(machine_snapshot):
    machine = machines.load("rtx_pro_5000_x4")
    machine["gpus"][1]["pcie_width"] = 8
    best = rank_groups(machine_snapshot(machine), None, 2)[0]
    assert "GPU 1" not in best.labels


def test_groups_of_impossible_size(machine_snapshot):
    with pytest.raises(ArgumentError, match="1 to 2"):
        rank_groups(machine_snapshot("rtx4090_x2_no_p2p"), None, 3)


STATUS = st.sampled_from([None, None, "ok", "ok", "ok", "mismatch", "timeout", "error", "refused"])
TRUTH = st.sampled_from([None, True, False])


@st.composite
def worlds(draw):
    """A random machine with random probes, most of it unlike any real one."""
    count = draw(st.integers(0, 4))
    gpus = tuple(GpuFacts(f"GPU-{i}", cuda_index=i, visible=True, name="x", mig_parent=draw(st.sampled_from(
        ["", "", "", "GPU-parent"])), pcie_gen_max=5, pcie_width=16, nvlink_version=4) for i in range(count))
    pairs, checks, rates = [], [], []
    for i in range(count):
        for j in range(i + 1, count):
            ends = f"GPU-{i}", f"GPU-{j}"
            nvlink = draw(TRUTH)
            pairs.append(PairFacts(*ends, nvlink=nvlink, nvlink_links=18 if nvlink else 0, ancestor="SYS",
                                   peer_access=draw(TRUTH), peer_access_back=draw(TRUTH)))
            for src, dst in (ends, ends[::-1]):
                status = draw(STATUS)
                if status is not None:
                    checks += [Check(kind, src, dst, status) for kind in ("push", "pull")]
                if draw(st.booleans()):
                    rates.append(Rate(src, dst, "push", "words", "copy", 4, "alone", draw(st.floats(1, 100))))
            checks.append(Check("atomics", *ends, draw(st.sampled_from(["ok", "lost"])), sent=10, counted=9))
    for gpu in gpus:
        rates += [Rate(gpu.uuid, HOST, op, "words", "copy", 4, "all", draw(st.floats(1, 100)))
                  for op in ("push", "pull")]
        rates.append(Rate(gpu.uuid, "all", "push", "words", "copy", 4, "all", draw(st.floats(1, 100))))
    problems = draw(st.sampled_from([(), (Problem("visible-empty", {"value": ""}),)])) if not count else ()
    snapshot = TopologySnapshot(gpus=gpus, pairs=tuple(pairs), problems=problems, host=HostFacts(
        cuda_state="ok" if count else "no-device", nvidia_hardware=draw(st.booleans())))
    probes = draw(st.sampled_from([None, ProbeResults(uuids=tuple(gpu.uuid for gpu in gpus), checks=tuple(checks),
                                                      rates=tuple(rates))]))
    group = draw(st.sampled_from([None, *([list(draw(st.permutations([g.uuid for g in gpus])))[:2]] if count else [])]))
    if group and draw(st.integers(0, 4)) == 0:
        group = [group[0]] * 2
    world = draw(st.sampled_from([None, 1, 2, 4])) if group is None else None
    override = draw(st.sampled_from([None, None, *PROTOCOLS]))
    return snapshot, probes, {"uuids": group, "world": world, "override": override, "allow_shared": draw(st.booleans())}


@settings(max_examples=500, deadline=None)
@given(worlds())
def test_doc_19_the_quoted_condition_is_true(world):
    """Whatever the machine: the rule that a verdict quotes holds for the inputs that it carries."""
    snapshot, probes, how = world
    verdict = decide(snapshot, probes, **how)
    assert REASONS[verdict.reason].holds(verdict.inputs), (verdict.reason, verdict.inputs)
    for pair in verdict.pairs:
        assert REASONS[pair.reason].holds(pair.inputs), (pair.reason, pair.inputs)
    assert "unknown GPU" not in verdict.text and "{" not in verdict.text.replace("{GPU", "")
    if verdict.protocol == "nvlink" and not verdict.forced_by:
        assert verdict.pairs and all(pair.reason == "pair-nvlink" for pair in verdict.pairs)
    if verdict.protocol == "pcie" and not verdict.forced_by and verdict.reason not in ("one-gpu", "shared-gpu"):
        assert all(pair.protocol in ("pcie", "nvlink") for pair in verdict.pairs)
    make_report(snapshot, probes, **how)


def test_doc_19_two_gpus_switched_off_by_hand_quote_the_switch(machine_snapshot):
    snapshot = machine_snapshot("rtx4090_x2_no_p2p")
    verdict = decide(snapshot, override="staged", override_by="MOE_TK_PROTOCOL")
    assert verdict.reason == "forced" and "MOE_TK_PROTOCOL" in verdict.text


def test_every_reason_is_reached():
    """No dead ids: the tests of this file or of the recorded machines meet each one (see the property test)."""
    ids = [reason.id for reason in (*PAIR_REASONS, *GROUP_REASONS)]
    assert len(ids) == len(set(ids))
    for reason in REASONS.values():
        assert reason.level in ("good", "info", "warn", "fail") and reason.meaning and reason.fix and reason.change
