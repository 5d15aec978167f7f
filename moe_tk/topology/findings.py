"""What is wrong and what to do about it: a pure function of snapshot, probes and verdict. Exit codes follow from it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from moe_tk.topology.expected import link_rate
from moe_tk.topology.facts import GpuFacts, TopologySnapshot
from moe_tk.topology.finding_table import KINDS
from moe_tk.topology.probes import HOST, Check, ProbeResults
from moe_tk.topology.reasons import fill
from moe_tk.topology.verdict import Verdict

GOOD, WARNINGS, WILL_NOT_WORK = 0, 1, 2
SLOW_SHARE = 0.6
_ORDER = {"fail": 0, "warn": 1, "info": 2}


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the list. level: "fail", "warn" or "info"."""

    id: str
    level: str
    text: str
    fix: str
    inputs: dict[str, Any] = field(default_factory=dict)


def finding(kind_id: str, level: str | None = None, **inputs: Any) -> Finding:
    """A finding of the table with its templates filled in."""
    kind = KINDS[kind_id]
    return Finding(kind_id, level or kind.level, _fill(kind.says, inputs), _fill(kind.fix, inputs), inputs)


def _fill(template: str, inputs: Mapping[str, Any]) -> str:
    return fill(template, inputs)


def find(snapshot: TopologySnapshot, probes: ProbeResults | None, verdict: Verdict) -> tuple[Finding, ...]:
    """All findings, the worst first."""
    found = [*_reading(snapshot), *_gpus(snapshot), *_platform(snapshot, verdict), *_probing(snapshot, probes, verdict)]
    unique = {(item.id, item.text): item for item in found}
    return tuple(sorted(unique.values(), key=lambda item: _ORDER[item.level]))


def exit_code(verdict: Verdict, findings: tuple[Finding, ...]) -> int:
    """0 good, 1 works with warnings, 2 will not work."""
    levels = {verdict.level, *(item.level for item in findings)}
    return WILL_NOT_WORK if "fail" in levels else WARNINGS if "warn" in levels else GOOD


def _reading(snapshot: TopologySnapshot) -> Iterator[Finding]:
    cuda_works = snapshot.host.cuda_state == "ok"
    for problem in snapshot.problems:
        level = None
        if problem.id in ("nvml-version-mismatch", "nvml-driver-not-loaded") and not cuda_works:
            level = "fail"
        if problem.id in KINDS:
            yield finding(problem.id, level, **problem.inputs)
    if snapshot.failed_calls:
        yield finding("failed-queries", count=len(snapshot.failed_calls), first=snapshot.failed_calls[0])


def _gpus(snapshot: TopologySnapshot) -> Iterator[Finding]:
    shown = snapshot.visible
    if order := _order_difference(snapshot):
        yield finding("order-differs", order=order)
    for gpu in shown:
        yield from _one_gpu(snapshot, gpu)
    slices = [gpu for gpu in shown if gpu.is_slice]
    if slices:
        yield finding("mig-slices", count=len(slices))
    models = sorted({gpu.name for gpu in shown if gpu.name})
    if len(models) > 1:
        yield finding("mixed-models", models=models)


def _one_gpu(snapshot: TopologySnapshot, gpu: GpuFacts) -> Iterator[Finding]:
    label = snapshot.label(gpu.uuid)
    if gpu.pcie_width and gpu.pcie_width_max and gpu.pcie_width < gpu.pcie_width_max:
        yield finding("pcie-width", gpu=label, width=gpu.pcie_width, width_max=gpu.pcie_width_max, pci=gpu.pci)
    if gpu.pcie_gen and gpu.pcie_gen_max and gpu.pcie_gen < gpu.pcie_gen_max:
        yield finding("pcie-gen", gpu=label, gen=gpu.pcie_gen, gen_max=gpu.pcie_gen_max, pci=gpu.pci)
    if gpu.nvlink_slots and gpu.nvlink_up is not None and gpu.nvlink_up < gpu.nvlink_slots:
        # a bridged card with nothing plugged in has all links down: that is no fault
        level = "warn" if gpu.nvlink_up else "info"
        yield finding("nvlink-down", level, gpu=label, down=gpu.nvlink_slots - gpu.nvlink_up, slots=gpu.nvlink_slots)
    if gpu.fabric_state in ("not-started", "in-progress"):
        yield finding("fabric-not-ready", "fail" if snapshot.host.cuda_state != "ok" else None, gpu=label,
                      state=gpu.fabric_state)
    if gpu.arch and gpu.arch.startswith("sm_") and int(gpu.arch[3:]) < 80:
        yield finding("arch-unsupported", gpu=label, arch=gpu.arch)
    if gpu.memory_bytes is None:
        yield finding("memory-unknown", gpu=label)


def _order_difference(snapshot: TopologySnapshot) -> str:
    """ "CUDA 0 = NVML 1, ..." when a plain number means another GPU in CUDA than in nvidia-smi, else ""."""
    entries = [part.strip() for part in (snapshot.host.visible_devices or "").split(",")]
    if snapshot.host.visible_devices_set and not all(entry.isdigit() for entry in entries):
        return ""  # named by UUID: no number is taken from anywhere
    wrong = []
    for gpu in snapshot.visible:
        if gpu.cuda_index is None or gpu.nvml_index is None:
            continue
        named = gpu.cuda_index
        if snapshot.host.visible_devices_set:
            if gpu.cuda_index >= len(entries):
                continue
            named = int(entries[gpu.cuda_index])
        if named != gpu.nvml_index:
            wrong.append(f"CUDA's {named} is nvidia-smi's {gpu.nvml_index} ({gpu.name or 'unknown'})")
    return ", ".join(wrong)


def _platform(snapshot: TopologySnapshot, verdict: Verdict) -> Iterator[Finding]:
    host = snapshot.host
    over_pcie = [pair for pair in verdict.pairs if not snapshot.pair(pair.a, pair.b).nvlink]
    if host.wsl and snapshot.gpus:
        yield finding("wsl-limited")
    if over_pcie and host.acs_redirect:
        yield finding("acs-redirect", bridges=list(host.acs_redirect), bridge=host.acs_redirect[0])
    if over_pcie and host.iommu == "translating":
        yield finding("iommu-translating")
    if over_pcie and host.virtual_machine and not host.wsl:
        yield finding("virtual-machine", vm=host.virtual_machine)
    if verdict.protocol == "nvlink" and verdict.multicast is False:
        yield finding("no-multicast", why=verdict.multicast_why)


def _probing(snapshot: TopologySnapshot, probes: ProbeResults | None, verdict: Verdict) -> Iterator[Finding]:
    open_pairs = [pair for pair in verdict.pairs if pair.reason in ("pair-unverified", "pair-unknown")]
    if open_pairs:
        yield finding("not-verified", count=len(open_pairs))
    for pair in verdict.pairs:
        if pair.reason == "pair-host-faster":
            yield finding("host-path-faster", pair=pair.inputs["pair"], staged=pair.inputs["staged_gbs"],
                          peer=pair.inputs["peer_gbs"], world=max(2, verdict.world - 1))
    if probes is None:
        return
    for check in probes.checks:
        yield from _check(snapshot, probes, check, verdict)
    yield from _slow_links(snapshot, probes, verdict)
    for note in probes.notes:
        yield finding("probe-left-out", what=note)


def _check(snapshot: TopologySnapshot, probes: ProbeResults, check: Check, verdict: Verdict) -> Iterator[Finding]:
    pair = f"{_name(snapshot, check.src)} -> {_name(snapshot, check.dst)}"
    what = f"{check.kind} {check.engine}".strip()
    cause, command = likely_cause(snapshot, check)
    if check.status == "mismatch":
        yield finding("probe-mismatch", pair=pair, what=what, offset=check.offset, wanted=check.wanted, seen=check.seen,
                      bad=check.bad_words, cause=cause, command=command)
    elif check.status == "timeout":
        yield finding("probe-timeout", pair=pair, what=what, limit=probes.limit_s, cause=cause, command=command)
    elif check.status == "error":
        yield finding("probe-error", pair=pair, what=what, detail=check.detail)
    elif check.status == "lost":
        lost = (check.sent or 0) - (check.counted or 0)
        yield finding("atomics-lost", pair=pair, lost=lost, sent=check.sent, protocol=verdict.protocol)


def _name(snapshot: TopologySnapshot, uuid: str) -> str:
    return "host memory" if uuid == HOST else "all" if uuid == "all" else snapshot.label(uuid)


def likely_cause(snapshot: TopologySnapshot, check: Check) -> tuple[str, str]:
    """(likely cause, command that checks it) of a probe that hung or read back wrong data."""
    host = snapshot.host
    pair = snapshot.pair(check.src, check.dst)
    if host.acs_redirect:
        return "ACS redirect on " + ", ".join(host.acs_redirect), "sudo lspci -vvv | grep -i acsctl  (ReqRedir+ is on)"
    if host.iommu == "translating":
        return "IOMMU translation", "cat /proc/cmdline; sudo dmesg | grep -i -e iommu -e dmar  (boot with iommu=pt)"
    if pair.nvlink:
        return "NVLink or its fabric", "nvidia-smi nvlink -s; sudo dmesg | grep -i xid"
    if host.virtual_machine:
        cause = f"the hypervisor ({host.virtual_machine}) or ACS on its host"
        return cause, "on the host: sudo lspci -vvv | grep -i acsctl"
    if host.acs_redirect is None:
        return "ACS or IOMMU (unreadable without root)", "sudo lspci -vvv | grep -i acsctl; cat /proc/cmdline"
    return "the driver", "cat /proc/driver/nvidia/version; sudo dmesg | grep -i -e xid -e nvrm"


def _slow_links(snapshot: TopologySnapshot, probes: ProbeResults, verdict: Verdict) -> Iterator[Finding]:
    for pair in verdict.pairs:
        wanted = link_rate(snapshot, snapshot.pair(pair.a, pair.b))
        if wanted.gbs is None or wanted.origin != "expected":
            continue
        for src, dst in ((pair.a, pair.b), (pair.b, pair.a)):
            best = probes.best_rate(src, dst, load="alone", payload=None)
            if best and best.gbs < SLOW_SHARE * wanted.gbs:
                yield finding("slow-link", pair=f"{_name(snapshot, src)} -> {_name(snapshot, dst)}", gbs=best.gbs,
                              wanted=wanted.gbs, basis=wanted.basis)
