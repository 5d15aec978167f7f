"""The machine around the GPUs, from files: container, VM, WSL, IOMMU, ACS, NUMA. `root` lets tests show another one."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path

from moe_tk.topology.facts import HostFacts

_ACS_CAPABILITY = 0x000D
_ACS_REQUEST_REDIRECT, _ACS_COMPLETION_REDIRECT = 1 << 2, 1 << 3
_EXTENDED_CONFIG = 0x100


class Files:
    """Read-only look at a file tree. Every method answers None for what is absent or may not be read."""

    def __init__(self, root: str | Path = "/") -> None:
        self.root = Path(root)

    def path(self, name: str) -> Path:
        return self.root / name.lstrip("/")

    def text(self, name: str) -> str | None:
        try:
            return self.path(name).read_text(errors="replace")
        except OSError:
            return None

    def bytes(self, name: str) -> bytes | None:
        try:
            return self.path(name).read_bytes()
        except OSError:
            return None

    def names(self, name: str) -> list[str] | None:
        try:
            return sorted(os.listdir(self.path(name)))
        except OSError:
            return None

    def exists(self, name: str) -> bool:
        return os.path.exists(self.path(name))


def read_host(files: Files, environ: Mapping[str, str], gpu_pci: Iterable[str] = ()) -> HostFacts:
    """Everything about the host that files and environment tell; the NVML and CUDA fields are left unknown."""
    pci = list(gpu_pci)
    version = files.text("proc/version")
    boot_id = files.text("proc/sys/kernel/random/boot_id")
    hostname = files.text("proc/sys/kernel/hostname")
    nodes = files.names("sys/devices/system/node")
    return HostFacts(
        hostname=hostname.strip() if hostname else None,
        boot_id=boot_id.strip() if boot_id else None,
        kernel=version.split()[2] if version and len(version.split()) > 2 else None,
        cpu=_cpu(files),
        numa_nodes=len([n for n in nodes if n.startswith("node") and n[4:].isdigit()]) if nodes is not None else None,
        container=_container(files, environ),
        virtual_machine=_virtual_machine(files, version),
        wsl=None if version is None else "microsoft" in version.lower(),
        iommu=_iommu(files, pci),
        acs_redirect=_acs_redirect(files, pci),
        driver_module=_driver_module(files),
        visible_devices=environ.get("CUDA_VISIBLE_DEVICES"),
        visible_devices_set="CUDA_VISIBLE_DEVICES" in environ,
        device_order=environ.get("CUDA_DEVICE_ORDER", ""),
        memory_bytes=_memory(files),
    )


def numa_node(files: Files, pci: str) -> int | None:
    """NUMA node of a PCI device; None when the firmware does not say (-1)."""
    written = files.text(f"sys/bus/pci/devices/{pci}/numa_node")
    try:
        node = int(written) if written else -1
    except ValueError:
        return None
    return node if node >= 0 else None


def nvidia_pci_devices(files: Files) -> list[str]:
    """PCI ids of NVIDIA display and 3D controllers that the kernel sees, NVML or not."""
    found = []
    for name in files.names("sys/bus/pci/devices") or ():
        vendor = (files.text(f"sys/bus/pci/devices/{name}/vendor") or "").strip()
        kind = (files.text(f"sys/bus/pci/devices/{name}/class") or "").strip()
        if vendor == "0x10de" and kind.startswith("0x03"):
            found.append(name)
    return found


def _cpu(files: Files) -> str | None:
    for line in (files.text("proc/cpuinfo") or "").splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("model name", "Processor", "cpu"):
            return value.strip()
    return None


def _memory(files: Files) -> int | None:
    for line in (files.text("proc/meminfo") or "").splitlines():
        if line.startswith("MemTotal:"):
            return int(line.split()[1]) * 1024
    return None


def _container(files: Files, environ: Mapping[str, str]) -> str | None:
    if environ.get("KUBERNETES_SERVICE_HOST"):
        return "kubernetes"
    if files.exists(".dockerenv"):
        return "docker"
    if files.exists("run/.containerenv"):
        return "podman"
    if environ.get("container"):
        return environ["container"]
    cgroup = files.text("proc/1/cgroup")
    for name in ("kubepods", "docker", "libpod", "lxc", "containerd"):
        if cgroup and name in cgroup:
            return {"kubepods": "kubernetes", "libpod": "podman"}.get(name, name)
    return "" if cgroup is not None else None


def _virtual_machine(files: Files, version: str | None) -> str | None:
    if version and "microsoft" in version.lower():
        return "Hyper-V (WSL)"
    product = " ".join(filter(None, (files.text("sys/class/dmi/id/sys_vendor"),
                                     files.text("sys/class/dmi/id/product_name")))).replace("\n", " ")
    for mark, name in (("KVM", "KVM"), ("QEMU", "QEMU"), ("VMware", "VMware"), ("VirtualBox", "VirtualBox"),
                       ("Amazon EC2", "Amazon EC2"), ("Google Compute Engine", "Google Compute Engine"),
                       ("Virtual Machine", "Hyper-V"), ("Xen", "Xen"), ("Firecracker", "Firecracker")):
        if mark in product and "metal" not in product:
            return name
    cpuinfo = files.text("proc/cpuinfo")
    if cpuinfo is None:
        return None
    flags = next((line for line in cpuinfo.splitlines() if line.startswith("flags")), "")
    if "hypervisor" in flags.split():
        return "Firecracker" if version and "firecracker" in version.lower() else "unnamed hypervisor"
    return ""


def _iommu(files: Files, pci: list[str]) -> str | None:
    kinds = {(files.text(f"sys/bus/pci/devices/{device}/iommu_group/type") or "").strip() for device in pci}
    kinds.discard("")
    if kinds:
        return "passthrough" if kinds == {"identity"} else "translating"
    units = files.names("sys/class/iommu")
    if units is None:
        return None
    if not units:
        return "off"
    words = (files.text("proc/cmdline") or "").split()
    return "passthrough" if "iommu=pt" in words or "iommu.passthrough=1" in words else "translating"


def _acs_redirect(files: Files, pci: list[str]) -> tuple[str, ...] | None:
    """Bridges above the GPUs whose ACS control sends peer traffic to the root; None when none could be read."""
    bridges = sorted({bridge for device in pci for bridge in _bridges_above(files, device)})
    readable = False
    redirecting = []
    for bridge in bridges:
        config = files.bytes(f"sys/bus/pci/devices/{bridge}/config")
        if config is None or len(config) <= _EXTENDED_CONFIG:
            continue  # only root sees the extended part
        readable = True
        if _acs_control(config) & (_ACS_REQUEST_REDIRECT | _ACS_COMPLETION_REDIRECT):
            redirecting.append(bridge)
    return tuple(redirecting) if readable else None


def _bridges_above(files: Files, device: str) -> list[str]:
    place = files.path(f"sys/bus/pci/devices/{device}")
    parts = Path(os.path.realpath(place)).parts
    return [part for part in parts[:-1] if part.count(":") == 2 and "." in part]


def _acs_control(config: bytes) -> int:
    """The ACS control register of a PCI Express configuration space, 0 when it has none."""
    offset, seen = _EXTENDED_CONFIG, set()
    while _EXTENDED_CONFIG <= offset <= len(config) - 8 and offset not in seen:
        seen.add(offset)
        (header,) = struct.unpack_from("<I", config, offset)
        if header & 0xFFFF == _ACS_CAPABILITY:
            return struct.unpack_from("<H", config, offset + 6)[0]
        offset = header >> 20
    return 0


def _driver_module(files: Files) -> str | None:
    """Version of the loaded kernel module, from the line that starts with "NVRM version:"."""
    for line in (files.text("proc/driver/nvidia/version") or "").splitlines():
        if line.startswith("NVRM version:"):
            for word in line.split():
                if word[0].isdigit() and "." in word:
                    return word
    return None
