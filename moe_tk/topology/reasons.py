"""Every reason id of a verdict: what it says, the condition of its branch, what would change it.

`holds` is the condition itself, evaluated on the inputs that the verdict carries: a verdict never quotes a rule that
did not apply to the machine (a test checks it for random machines).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Inputs = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Reason:
    """says and change are templates over the inputs. level: "good", "info", "warn" or "fail"."""

    id: str
    level: str
    says: str
    holds: Callable[[Inputs], bool]
    change: str
    meaning: str
    fix: str


class _Words(dict):
    """Template values as people write them: lists joined, unknown for None, rates with three digits."""

    def __missing__(self, key: str) -> str:
        return "unknown"

    def __getitem__(self, key: str) -> Any:
        return words(super().__getitem__(key)) if key in self else "unknown"


def words(value: Any) -> str:
    if value is None:
        return "unknown"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.3g}"
    if isinstance(value, (list, tuple)):
        return ", ".join(words(item) for item in value) or "none"
    return str(value)


def fill(template: str, inputs: Inputs) -> str:
    return template.format_map(_Words(inputs))


def _pair_open(i: Inputs) -> bool:
    return i["forward"] == "ok" and i["backward"] == "ok"


PAIR_REASONS = (
    Reason("same-gpu", "fail", "both are {gpu}", lambda i: i["physical_a"] == i["physical_b"],
           "give every rank a GPU of its own",
           "Two members of the group are one physical GPU (or two MIG slices of one card).",
           "Start each rank with another GPU: set LOCAL_RANK or CUDA_VISIBLE_DEVICES per rank."),
    Reason("slice-no-peer", "info", "{pair}: a MIG slice has no peer access", lambda i: i["slices"] > 0,
           "whole GPUs instead of slices",
           "MIG slices cannot address another GPU's memory, so data goes through host memory.",
           "Turn MIG off for the GPUs of the group, or use one rank or the CPU backend."),
    Reason("pair-mismatch", "warn", "{pair}: peer access is claimed, but reading back found wrong data ({detail})",
           lambda i: "mismatch" in (i["forward"], i["backward"]),
           "direct access that reads back right: see the command in the list below",
           "The driver says that the GPUs may address each other, but what one wrote did not arrive. Usually the "
           "platform "
           "redirects or drops the transfers: ACS on a PCIe bridge, a translating IOMMU, a virtual machine, or the "
           "driver.",
           "Check ACS with `sudo lspci -vvv | grep -i acsctl` (look for ReqRedir+), the IOMMU with `cat "
           "/proc/cmdline` and "
           "`dmesg | grep -i iommu`; turn ACS redirect off or boot with iommu=pt, then run moe_tk doctor --probe "
           "again."),
    Reason("pair-timeout", "warn", "{pair}: the probe hung and was killed after {limit} s",
           lambda i: "timeout" in (i["forward"], i["backward"]),
           "direct access that answers in time",
           "A write to the other GPU or its signal never arrived. The pair counts as having no peer access.",
           "As for pair-mismatch; look at `dmesg | grep -i -e xid -e iommu` for a fault at that moment."),
    Reason("pair-probe-failed", "warn", "{pair}: the probe failed ({detail})",
           lambda i: "error" in (i["forward"], i["backward"]),
           "a probe that runs to its end",
           "The probe's process ended with an error, for example an illegal address or no memory left.",
           "Read the text; free the GPUs if others use them, then run moe_tk doctor --probe --no-cache."),
    Reason("pair-no-peer", "info", "{pair}: no peer access ({cause})",
           lambda i: i["claimed"] is False or "refused" in (i["forward"], i["backward"]),
           "a driver, BIOS or slot that gives this pair peer access",
           "The driver refuses direct access between these GPUs: consumer cards, two sockets on some chipsets, or WSL.",
           "Nothing to mend on cards whose driver never allows it; else look at `nvidia-smi topo -p2p r`."),
    Reason("pair-host-faster", "info",
           "{pair}: direct access moves {peer_gbs} GB/s, through host memory {staged_gbs} GB/s (measured)",
           lambda i: _pair_open(i) and i["peer_gbs"] < i["staged_gbs"],
           "direct access faster than {staged_gbs} GB/s",
           "Direct access works but is slower than going through host memory, as over some socket interconnects.",
           "Choose GPUs nearer to each other (moe_tk doctor --group N), or force it with MOE_TK_PROTOCOL=pcie."),
    Reason("pair-nvlink", "good", "{pair}: NVLink ({links} links), read back right both ways",
           lambda i: i["nvlink"] is True and _pair_open(i) and not i["lossy"],
           "an NVLink that goes down", "The pair is connected by NVLink and a real transfer was verified both ways.",
           "Nothing to do."),
    Reason("pair-nvlink-lossy", "warn", "{pair}: NVLink, but remote increments were lost ({lost} of {sent})",
           lambda i: i["nvlink"] is True and _pair_open(i) and i["lossy"],
           "remote atomics that all arrive",
           "Data arrives, remote atomic increments do not all: the pair is used like a PCIe pair, without them.",
           "Report it with the file of moe_tk doctor --probe --save FILE."),
    Reason("pair-pcie", "good", "{pair}: peer access over PCIe ({ancestor}), read back right both ways",
           lambda i: i["nvlink"] is False and _pair_open(i),
           "an NVLink bridge between the two",
           "The GPUs address each other over PCIe and a real transfer was verified both ways.", "Nothing to do."),
    Reason("pair-peer-link-unknown", "good", "{pair}: peer access read back right both ways; the link is not known",
           lambda i: i["nvlink"] is None and _pair_open(i),
           "NVML that says whether this is NVLink",
           "Direct access was verified, but nothing says what the link is. PCIe rules are safe on any link.",
           "Make NVML usable (see the nvml- entries) if this machine has NVLink."),
    Reason("pair-unverified", "warn", "{pair}: the driver claims peer access ({expected}), but nothing was verified "
                                      "yet",
           lambda i: i["claimed"] is True and not _pair_open(i),
           "a probe that reads back right: {expected}",
           "Capability is only a hint: some machines drop the writes. Until a probe has read back right, the pair "
           "counts "
           "as having no peer access.", "Run moe_tk doctor --probe (the layer does the same check when it is built)."),
    Reason("pair-unknown", "warn", "{pair}: nobody could say whether they have peer access",
           lambda i: i["claimed"] is None and not _pair_open(i),
           "a probe that reads back right: pcie or nvlink",
           "Neither NVML nor CUDA answered for this pair, and no probe ran.",
           "Run moe_tk doctor --probe; see the cuda- and nvml- entries."),
)

GROUP_REASONS = (
    Reason("cpu-tensors", "good", "the tensors of this layer are on the CPU",
           lambda i: i["device"] == "cpu" and i["asked"] is None, "a layer with tensors on GPUs",
           "The layer runs on the CPU over shared memory, whatever GPUs the machine has.", "Nothing to do."),
    Reason("cpu-forced", "info", "set by {by}", lambda i: i["device"] == "cpu" and i["asked"] == "shm",
           "nothing: it is what a layer on the CPU uses anyway",
           "A person asked for shared memory, and the tensors of the layer are on the CPU.", "Nothing to do."),
    Reason("cpu-impossible", "fail",
           "protocol '{asked}' moves data between GPUs, but the tensors of this layer are on the CPU: "
           "use protocol='shm' or 'auto'",
           lambda i: i["device"] == "cpu" and i["asked"] not in (None, "shm"), "a layer with tensors on GPUs",
           "A GPU protocol was asked for a layer on the CPU; the layer refuses to start.", "It was asked for by {by}."),
    Reason("no-gpu", "good", "no NVIDIA GPU here: the CPU backend is used",
           lambda i: i["gpus"] == 0 and not i["hardware"], "a GPU",
           "There is no GPU; the layer runs on the CPU over shared memory, with the same API.",
           "Nothing to do."),
    Reason("gpus-hidden", "good", "GPUs hidden by CUDA_VISIBLE_DEVICES={value}: the CPU backend is used",
           lambda i: i["hidden"] is True,
           "CUDA_VISIBLE_DEVICES unset, or naming a GPU",
           "The variable is set but names no GPU, so CUDA shows none.", "Unset CUDA_VISIBLE_DEVICES to use the GPUs."),
    Reason("gpus-unusable", "warn", "there is NVIDIA hardware, but CUDA shows no GPU ({cause}): the CPU backend is "
                                    "used",
           lambda i: i["gpus"] == 0 and i["hardware"] and not i["hidden"],
           "a CUDA driver that works",
           "Hardware or device files are there, but this process cannot use them.",
           "See the list: the library is missing, the driver is not loaded or does not fit, or the container has no "
           "GPUs."),
    Reason("one-gpu", "good", "one rank on {gpu}: there is no pair to connect", lambda i: i["world"] == 1,
           "a second rank", "With one rank all signals stay in its own memory; the simplest GPU protocol is used.",
           "Nothing to do."),
    Reason("two-ranks-one-gpu", "fail", "ranks {ranks} are all on {gpu}",
           lambda i: len(i["ranks"]) > 1 and len(i["uuids"]) > len(set(i["physical"])),
           "one GPU per rank",
           "Two ranks were given the same physical GPU (or two slices of one card); they would wait for each other.",
           "Set the device from LOCAL_RANK, or one CUDA_VISIBLE_DEVICES per rank. To emulate ranks on one device on "
           "purpose, pass allow_shared=True."),
    Reason("shared-gpu", "info", "ranks {ranks} share {gpu} on purpose (emulation)",
           lambda i: len(i["ranks"]) == i["world"] > 1 and len(set(i["physical"])) == 1,
           "one GPU per rank", "Several ranks run on one device because somebody asked for it: everything is local.",
           "Nothing to do; it shows that things work, not how fast they are."),
    Reason("too-few-gpus", "fail", "a group of {world} was asked for, but {visible} GPUs are visible",
           lambda i: i["world"] > i["visible"],
           "{world} visible GPUs", "The group is larger than the machine.",
           "Ask for at most {visible}, make more GPUs visible, or use the CPU backend (MOE_TK_PROTOCOL=shm)."),
    Reason("all-nvlink", "good", "NVLink between all GPUs (pairs: {pairs}), verified",
           lambda i: i["pairs"] == i["nvlink_pairs"] > 0,
           "a pair of the group without NVLink, or one that fails its probe",
           "Every two GPUs of the group have NVLink (bridges or one switch fabric), and transfers read back right.",
           "Nothing to do."),
    Reason("nvlink-islands", "good", "NVLink only inside {islands}; {other_pairs} pairs go over PCIe",
           lambda i: 0 < i["nvlink_pairs"] < i["pairs"] and i["nvlink_pairs"] + i["pcie_pairs"] == i["pairs"],
           "a group inside one island: {islands}",
           "Some pairs have NVLink, others only PCIe. The group needs one protocol, and remote atomics over PCIe lose "
           "increments, so the PCIe protocol is used for all; the NVLink pairs are simply faster.",
           "Choose ranks inside one island (moe_tk doctor --group N names them)."),
    Reason("all-peer", "good", "all {pairs} pairs have verified peer access, no pair is known to have NVLink",
           lambda i: i["pairs"] == i["pcie_pairs"] > 0,
           "NVLink between all pairs", "Direct access over PCIe, verified both ways for every pair.", "Nothing to do."),
    Reason("host-faster", "info",
           "all to all moves {peer_gbs} GB/s per GPU directly, {staged_gbs} GB/s through host memory (measured)",
           lambda i: i["staged_pairs"] == 0 and i["peer_gbs"] < i["staged_gbs"],
           "direct access faster than {staged_gbs} GB/s while all GPUs talk",
           "Direct access works for every pair, but when all GPUs talk at once host memory is faster.",
           "Use fewer or nearer GPUs (moe_tk doctor --group N), or force it with MOE_TK_PROTOCOL=pcie."),
    Reason("some-pair-slower", "info", "direct access is slower than host memory for {slow}",
           lambda i: len(i["slow"]) > 0 and i["blocked"] == [],
           "a group without those pairs", "One protocol serves the whole group, and for these pairs host memory wins.",
           "Choose GPUs without those pairs (moe_tk doctor --group N), or force it with MOE_TK_PROTOCOL=pcie."),
    Reason("some-pair-vetoed", "warn", "a probe vetoed direct access for {vetoed}", lambda i: len(i["vetoed"]) > 0,
           "probes that read back right for those pairs",
           "Direct access is claimed but a real transfer failed, was wrong or hung; so nobody in the group uses it.",
           "See the reason of each pair and its command."),
    Reason("some-pair-no-peer", "info", "no peer access for {blocked}",
           lambda i: len(i["blocked"]) > 0 and i["vetoed"] == [],
           "peer access for those pairs, or a group without them",
           "At least one pair cannot address each other's memory; one protocol serves the whole group.",
           "Choose GPUs that have it (moe_tk doctor --group N), or accept host memory."),
    Reason("unverified", "warn", "not verified yet: {expected} is expected; until then data goes through host memory",
           lambda i: i["unverified_pairs"] > 0 and i["vetoed"] == [] and i["blocked"] == [],
           "moe_tk doctor --probe, if all reads back right: {expected}",
           "The driver claims direct access, or says nothing, and no probe has verified it on this boot of this "
           "machine.",
           "Run moe_tk doctor --probe once; the result is kept. The layer runs the same check when it is built."),
    Reason("forced", "info", "{protocol} was asked for by {by}; without that it would be {natural} ({natural_reason})",
           lambda i: i["protocol"] == i["asked"] and i["conflict"] == "",
           "unset {by}", "A person chose the protocol, and it can work here.",
           "Nothing to do, if this is what you want."),
    Reason("forced-against-evidence", "warn",
           "{protocol} was asked for by {by}, but {conflict}; without that it would be {natural} ({natural_reason})",
           lambda i: i["protocol"] == i["asked"] and i["conflict"] != "" and not i["impossible"],
           "unset {by}",
           "A person chose a protocol that the evidence does not support: it may be wrong or wait until its time-out.",
           "Unset it, or run moe_tk doctor --probe so that there is evidence."),
    Reason("forced-impossible", "fail", "{asked} was asked for by {by}, but {conflict}",
           lambda i: i["impossible"] is True,
           "unset {by}: {natural} would be used ({natural_reason})",
           "A person chose a protocol that cannot work here; the layer refuses to start.", "Unset it."),
)

REASONS = {reason.id: reason for reason in (*PAIR_REASONS, *GROUP_REASONS)}
