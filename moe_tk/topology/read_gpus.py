"""NVML -> GpuFacts, one GPU or MIG slice at a time. Every query may fail; what failed stays unknown."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from typing import Any

from moe_tk.topology.facts import GpuFacts
from moe_tk.topology.host import Files, numa_node
from moe_tk.topology.nvml import (
    FABRIC_STATE,
    FUNCTION_NOT_FOUND,
    INVALID_ARGUMENT,
    NOT_SUPPORTED,
    REMOTE_GPU,
    REMOTE_SWITCH,
    Nvml,
    normal_pci,
    text,
)

MAX_LINKS = 36


@dataclass(frozen=True, slots=True)
class Link:
    """One NVLink slot that exists. far: "gpu", "switch" or None (unknown, as in VMs that hide the switch)."""

    up: bool
    far: str | None = None
    far_pci: str | None = None
    version: int | None = None


@dataclass(slots=True)
class ReadGpu:
    """A GPU as NVML shows it: facts, handle, links."""

    facts: GpuFacts
    handle: Any
    links: tuple[Link, ...] | None = None
    slices: list[ReadGpu] = field(default_factory=list)


def read_gpus(nvml: Nvml, files: Files) -> list[ReadGpu]:
    """All GPUs in NVML order, each with its MIG slices. Empty when NVML cannot be used."""
    if not nvml.usable:
        return []
    found = []
    for index in range(nvml.ask("nvmlDeviceGetCount") or 0):
        handle = nvml.ask("nvmlDeviceGetHandleByIndex", index, about=str(index))
        if handle is None:
            continue
        read = _read_gpu(nvml, files, index, handle)
        read.slices = _read_slices(nvml, read)
        found.append(read)
    return found


def _read_gpu(nvml: Nvml, files: Files, index: int, handle: Any) -> ReadGpu:
    about = str(index)

    def ask(name: str, *args: Any) -> Any:
        return nvml.ask(name, handle, *args, about=about)

    pci_info = ask("nvmlDeviceGetPciInfo")
    pci = normal_pci(getattr(pci_info, "busId", None))
    uuid = text(ask("nvmlDeviceGetUUID")) or f"NVML-{index}-{pci or 'unknown'}"
    capability = ask("nvmlDeviceGetCudaComputeCapability")
    ecc, mig = _quiet(nvml, "nvmlDeviceGetEccMode", handle), _quiet(nvml, "nvmlDeviceGetMigMode", handle)
    links = _read_links(nvml, handle, about)
    fabric_state, fabric_id = _read_fabric(nvml, handle, about)
    up = [link for link in links or () if link.up]
    return ReadGpu(GpuFacts(
        uuid=uuid, nvml_index=index, pci=pci, name=text(ask("nvmlDeviceGetName")),
        arch=f"sm_{capability[0]}{capability[1]}" if capability else None,
        memory_bytes=_memory(nvml, handle, about), mig_parent="", mig_enabled=bool(mig[0]) if mig else False,
        pcie_gen=ask("nvmlDeviceGetCurrPcieLinkGeneration"), pcie_gen_max=ask("nvmlDeviceGetMaxPcieLinkGeneration"),
        pcie_width=ask("nvmlDeviceGetCurrPcieLinkWidth"), pcie_width_max=ask("nvmlDeviceGetMaxPcieLinkWidth"),
        numa_node=numa_node(files, pci) if pci else None, ecc=bool(ecc[0]) if ecc else None,
        fabric_state=fabric_state, fabric_id=fabric_id,
        nvlink_slots=None if links is None else len(links), nvlink_up=None if links is None else len(up),
        nvlink_version=max((link.version for link in up if link.version), default=None),
    ), handle, links)


def _quiet(nvml: Nvml, name: str, *args: Any) -> Any:
    """A query that most GPUs do not support: its failure is no news."""
    value, failure = nvml.try_ask(name, *args)
    if failure is not None and failure.code not in (NOT_SUPPORTED, INVALID_ARGUMENT, FUNCTION_NOT_FOUND, None):
        nvml.failures.append(failure)
    return value


def _memory(nvml: Nvml, handle: Any, about: str) -> int | None:
    """Total bytes. Unified-memory parts refuse both forms of the query, and old bindings lack the second."""
    info, failure = nvml.try_ask("nvmlDeviceGetMemoryInfo", handle, about=about)
    if info is None:
        version = getattr(nvml.binding, "nvmlMemory_v2", None)
        if version is not None:
            info, _ = nvml.try_ask("nvmlDeviceGetMemoryInfo", handle, version, about=about)
    if info is None and failure is not None:
        nvml.failures.append(failure)
    total = getattr(info, "total", None)
    return int(total) if total else None


def _read_links(nvml: Nvml, handle: Any, about: str) -> tuple[Link, ...] | None:
    """Slots whose state is readable. Not supported means that the slot does not exist, never that it is down."""
    links = []
    for slot in range(MAX_LINKS):
        state, failure = nvml.try_ask("nvmlDeviceGetNvLinkState", handle, slot, about=f"{about}, link {slot}")
        if failure is not None:
            if failure.code is None:  # the binding cannot ask at all
                return None
            if failure.code in (NOT_SUPPORTED, INVALID_ARGUMENT):
                continue
            nvml.failures.append(failure)
            continue
        links.append(_read_link(nvml, handle, slot) if state else Link(False))
    return tuple(links)


def _read_link(nvml: Nvml, handle: Any, slot: int) -> Link:
    kind, _ = nvml.try_ask("nvmlDeviceGetNvLinkRemoteDeviceType", handle, slot)
    far = {REMOTE_GPU: "gpu", REMOTE_SWITCH: "switch"}.get(kind)
    remote, _ = nvml.try_ask("nvmlDeviceGetNvLinkRemotePciInfo", handle, slot)
    version, _ = nvml.try_ask("nvmlDeviceGetNvLinkVersion", handle, slot)
    return Link(True, far, normal_pci(getattr(remote, "busId", None)), version)


def _read_fabric(nvml: Nvml, handle: Any, about: str) -> tuple[str | None, str | None]:
    """State of the NVSwitch fabric and its identity. ("none", None) on GPUs without one."""
    for struct, function in (("c_nvmlGpuFabricInfoV_t", "nvmlDeviceGetGpuFabricInfoV"),
                             ("c_nvmlGpuFabricInfo_t", "nvmlDeviceGetGpuFabricInfo")):
        kind = getattr(nvml.binding, struct, None)
        if kind is None:
            continue
        info = kind()
        _, failure = nvml.try_ask(function, handle, ctypes.byref(info), about=about)
        if failure is None:
            state = FABRIC_STATE.get(info.state)
            cluster = bytes(info.clusterUuid).hex()
            return state, f"{cluster}/{info.cliqueId}" if state == "completed" else None
        if failure.code == NOT_SUPPORTED:
            return "none", None
    return None, None


def _read_slices(nvml: Nvml, parent: ReadGpu) -> list[ReadGpu]:
    if not parent.facts.mig_enabled:
        return []
    slices = []
    for index in range(nvml.ask("nvmlDeviceGetMaxMigDeviceCount", parent.handle) or 0):
        handle, failure = nvml.try_ask("nvmlDeviceGetMigDeviceHandleByIndex", parent.handle, index)
        if failure is not None:  # this place holds no slice
            continue
        about = f"{parent.facts.nvml_index}, slice {index}"
        attributes = nvml.ask("nvmlDeviceGetAttributes", handle, about=about)
        megabytes = getattr(attributes, "memorySizeMB", None)
        memory = _memory(nvml, handle, about) or (megabytes << 20 if megabytes else None)
        uuid = text(nvml.ask("nvmlDeviceGetUUID", handle, about=about)) or f"MIG-{parent.facts.uuid}-{index}"
        slices.append(ReadGpu(GpuFacts(
            uuid=uuid, pci=parent.facts.pci, name=text(nvml.ask("nvmlDeviceGetName", handle, about=about)),
            arch=parent.facts.arch, sm_count=getattr(attributes, "multiprocessorCount", None), memory_bytes=memory,
            mig_parent=parent.facts.uuid, mig_enabled=True, numa_node=parent.facts.numa_node, ecc=parent.facts.ecc,
            pcie_gen=parent.facts.pcie_gen, pcie_gen_max=parent.facts.pcie_gen_max,
            pcie_width=parent.facts.pcie_width, pcie_width_max=parent.facts.pcie_width_max,
        ), handle))
    return slices
