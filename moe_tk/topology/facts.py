"""What was read about a machine: frozen records, versioned JSON. None means unknown, never a guess.

Nothing here reads anything: reader.py fills these, verdict.py judges them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from moe_tk.topology.codec import check_schema, from_plain, to_plain

SNAPSHOT_SCHEMA = "moe_tk.topology/1"
ANCESTORS = ("PIX", "PXB", "PHB", "NODE", "SYS")  # nearest first; as nvidia-smi topo prints them


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """One GPU, or one MIG slice (then memory, SMs and name are those of the slice).

    uuid is the identity; indices only help people. cuda_index is its place among the devices CUDA shows this process,
    None when hidden or unknown. Sizes are bytes. mig_parent: UUID of the sliced GPU, "" when this is no slice.
    fabric_state: "none" (no NVSwitch fabric), "not-started", "in-progress", "completed".
    """

    uuid: str
    cuda_index: int | None = None
    nvml_index: int | None = None
    visible: bool | None = None
    pci: str | None = None               # 0000:17:00.0
    name: str | None = None
    arch: str | None = None              # sm_90
    sm_count: int | None = None
    memory_bytes: int | None = None
    shared_per_block: int | None = None  # opt-in maximum
    mig_parent: str | None = None
    mig_enabled: bool | None = None
    pcie_gen: int | None = None
    pcie_gen_max: int | None = None
    pcie_width: int | None = None
    pcie_width_max: int | None = None
    numa_node: int | None = None
    ecc: bool | None = None
    multicast: bool | None = None
    fabric_state: str | None = None
    fabric_id: str | None = None         # cluster and clique; equal for GPUs of one fabric
    nvlink_slots: int | None = None      # slots whose state is readable; others do not exist
    nvlink_up: int | None = None
    nvlink_version: int | None = None

    @property
    def is_slice(self) -> bool:
        return bool(self.mig_parent)

    @property
    def physical(self) -> str:
        """UUID of the card itself: two slices of one card have the same."""
        return self.mig_parent or self.uuid


@dataclass(frozen=True, slots=True)
class PairFacts:
    """Two GPUs. `a` and `b` are UUIDs; facts with _back hold for b -> a.

    nvlink: connected by NVLink, from a query about this pair. nvlink_links: how many links; None when the driver only
    says that there are some. nvlink_via: "direct", "switch" or "none". p2p_*: what NVML says, "ok" or the cause.
    peer_access: what CUDA says. native_atomics: CUDA says that atomics work across this pair.
    """

    a: str
    b: str
    nvlink: bool | None = None
    nvlink_links: int | None = None
    nvlink_via: str | None = None
    ancestor: str | None = None
    p2p_read: str | None = None
    p2p_write: str | None = None
    p2p_atomics: str | None = None
    p2p_pci: str | None = None
    peer_access: bool | None = None
    peer_access_back: bool | None = None
    native_atomics: bool | None = None

    @property
    def claimed(self) -> bool | None:
        """Does the driver claim peer access both ways? CUDA's answer counts before NVML's; None when neither knows."""
        if self.peer_access is not None and self.peer_access_back is not None:
            return self.peer_access and self.peer_access_back
        if self.peer_access is False or self.peer_access_back is False:
            return False
        if self.p2p_read is None or self.p2p_write is None:
            return None
        return self.p2p_read == "ok" and self.p2p_write == "ok"


@dataclass(frozen=True, slots=True)
class HostFacts:
    """The machine around the GPUs. Empty strings mean "none", None means unknown."""

    hostname: str | None = None
    boot_id: str | None = None
    kernel: str | None = None
    cpu: str | None = None
    numa_nodes: int | None = None
    container: str | None = None         # "docker", "podman", "kubernetes", "lxc", ...
    virtual_machine: str | None = None   # "KVM", "Firecracker", ...
    wsl: bool | None = None
    iommu: str | None = None             # "off", "passthrough", "translating"
    acs_redirect: tuple[str, ...] | None = None  # PCI bridges on GPU paths that redirect peer traffic to the root
    driver: str | None = None            # of the user library
    driver_module: str | None = None     # of the kernel module
    nvml_version: str | None = None
    nvml_library: str | None = None
    nvml_state: str | None = None        # "ok", or the id of the finding that says why not
    nvml_error: str | None = None
    cuda_version: str | None = None      # most that the driver supports
    cuda_state: str | None = None        # "ok", "no-library", "no-device", "failed"
    cuda_error: str | None = None
    visible_devices: str | None = None   # text of CUDA_VISIBLE_DEVICES, None when unset
    visible_devices_set: bool | None = None
    device_order: str | None = None      # text of CUDA_DEVICE_ORDER, "" when unset
    memory_bytes: int | None = None
    nvidia_hardware: bool | None = None  # an NVIDIA GPU is in the machine, whether or not anything can use it


@dataclass(frozen=True, slots=True)
class ToolFact:
    """One program, header or package that a build or a run uses, or a candidate that was passed over."""

    what: str
    path: str | None = None
    version: str | None = None
    chosen: bool = False
    note: str = ""


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that went wrong while reading: the id of the finding it leads to, and its inputs."""

    id: str
    inputs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TopologySnapshot:
    """Everything read about one machine at one time."""

    schema: str = SNAPSHOT_SCHEMA
    moe_tk: str | None = None
    taken_at: str | None = None          # UTC, ISO 8601
    host: HostFacts = HostFacts()
    gpus: tuple[GpuFacts, ...] = ()
    pairs: tuple[PairFacts, ...] = ()
    tools: tuple[ToolFact, ...] = ()
    problems: tuple[Problem, ...] = ()
    failed_calls: tuple[str, ...] = ()   # single queries that failed; the report goes on without them

    def gpu(self, uuid: str) -> GpuFacts:
        """The GPU with this UUID. Raises KeyError."""
        for gpu in self.gpus:
            if gpu.uuid == uuid:
                return gpu
        raise KeyError(uuid)

    def pair(self, one: str, other: str) -> PairFacts:
        """The facts about two UUIDs, oriented so that a == one; all unknown when nothing was read."""
        for pair in self.pairs:
            if (pair.a, pair.b) == (one, other):
                return pair
            if (pair.a, pair.b) == (other, one):
                return PairFacts(one, other, pair.nvlink, pair.nvlink_links, pair.nvlink_via, pair.ancestor,
                                 pair.p2p_read, pair.p2p_write, pair.p2p_atomics, pair.p2p_pci,
                                 pair.peer_access_back, pair.peer_access, pair.native_atomics)
        return PairFacts(one, other)

    @property
    def visible(self) -> tuple[GpuFacts, ...]:
        """GPUs this process may use, in CUDA order; when CUDA cannot be asked, all that are not known to be hidden."""
        shown = [gpu for gpu in self.gpus if gpu.visible is not False]
        return tuple(sorted(shown, key=lambda g: (g.cuda_index is None, g.cuda_index, g.nvml_index is None,
                                                  g.nvml_index, g.uuid)))

    def label(self, uuid: str) -> str:
        """How people name it: "GPU 3" by CUDA index, else "NVML 3", else the short UUID."""
        try:
            gpu = self.gpu(uuid)
        except KeyError:
            return short_uuid(uuid)
        if gpu.cuda_index is not None:
            return f"GPU {gpu.cuda_index}"
        return f"NVML {gpu.nvml_index}" if gpu.nvml_index is not None else short_uuid(uuid)


def short_uuid(uuid: str) -> str:
    """The first twelve characters: "GPU-1a2b3c4d"."""
    return uuid[:12]


def snapshot_to_json(snapshot: TopologySnapshot) -> dict[str, Any]:
    return to_plain(snapshot)


def snapshot_from_json(data: Any) -> TopologySnapshot:
    """Raises TopologyError when the schema is another one or a field has the wrong shape."""
    check_schema(data, SNAPSHOT_SCHEMA)
    return from_plain(TopologySnapshot, data, "snapshot")
