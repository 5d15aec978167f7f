"""Per-pair facts from NVML: NVLink by a query about the pair itself, P2P capabilities, the common PCIe ancestor."""

from __future__ import annotations

import itertools

from moe_tk.topology.facts import PairFacts
from moe_tk.topology.nvml import ANCESTOR, P2P_ATOMICS, P2P_NVLINK, P2P_PCI, P2P_READ, P2P_STATUS, P2P_WRITE, Nvml
from moe_tk.topology.read_gpus import Link, ReadGpu


def read_pairs(nvml: Nvml, gpus: list[ReadGpu]) -> list[PairFacts]:
    """One record for every two whole GPUs that NVML shows."""
    return [_read_pair(nvml, one, other) for one, other in itertools.combinations(gpus, 2)]


def _read_pair(nvml: Nvml, one: ReadGpu, other: ReadGpu) -> PairFacts:
    about = f"{one.facts.nvml_index}, {other.facts.nvml_index}"
    level = nvml.ask("nvmlDeviceGetTopologyCommonAncestor", one.handle, other.handle, about=about)
    status = {index: _p2p(nvml, one, other, index, about) for index in (P2P_READ, P2P_WRITE, P2P_NVLINK, P2P_ATOMICS,
                                                                       P2P_PCI)}
    nvlink, links, via = _nvlink(one, other, status[P2P_NVLINK])
    return PairFacts(
        a=one.facts.uuid, b=other.facts.uuid, nvlink=nvlink, nvlink_links=links, nvlink_via=via,
        ancestor=ANCESTOR.get(level), p2p_read=status[P2P_READ], p2p_write=status[P2P_WRITE],
        p2p_atomics=status[P2P_ATOMICS], p2p_pci=status[P2P_PCI])


def _p2p(nvml: Nvml, one: ReadGpu, other: ReadGpu, index: int, about: str) -> str | None:
    """The worse of both directions: "ok" only when both are."""
    found = []
    for left, right in ((one, other), (other, one)):
        value, failure = nvml.try_ask("nvmlDeviceGetP2PStatus", left.handle, right.handle, index,
                                      about=f"{about}, {index}")
        if failure is not None:
            if index in (P2P_READ, P2P_WRITE):
                nvml.failures.append(failure)
            return None
        found.append(P2P_STATUS.get(value))
    return next((status for status in found if status != "ok"), "ok")


def _nvlink(one: ReadGpu, other: ReadGpu, status: str | None) -> tuple[bool | None, int | None, str | None]:
    """(connected, links, via). The driver's answer about the pair decides; the far ends of the links fill in the rest.

    That a GPU has active links says nothing about a pair: they may lead to a third GPU.
    """
    direct = _links_to(one.links, other.facts.pci)
    switched = min(_switch_links(one.links), _switch_links(other.links))
    if switched and not _same_fabric(one, other):
        switched = 0
    if status is not None and status != "ok":
        return False, 0, "none"
    if direct:
        return True, direct, "direct"
    if switched:
        return True, switched, "switch"
    if status == "ok":  # far ends unreadable, as in a VM that hides the switches
        up = [gpu.facts.nvlink_up for gpu in (one, other)]
        hidden = all(_far_ends_unknown(gpu.links) for gpu in (one, other))
        return True, min(n for n in up if n is not None) if hidden and None not in up else None, None
    if one.links is None or other.links is None or _far_ends_unknown(one.links) and one.links:
        return None, None, None
    return False, 0, "none"


def _links_to(links: tuple[Link, ...] | None, pci: str | None) -> int:
    return sum(link.up and link.far_pci == pci for link in links or ()) if pci else 0


def _switch_links(links: tuple[Link, ...] | None) -> int:
    return sum(link.up and link.far == "switch" for link in links or ())


def _far_ends_unknown(links: tuple[Link, ...] | None) -> bool:
    return all(link.far is None for link in links or () if link.up)


def _same_fabric(one: ReadGpu, other: ReadGpu) -> bool:
    """Do the switches belong together? By fabric identity when both have one, else by a switch that both reach."""
    ids = one.facts.fabric_id, other.facts.fabric_id
    if None not in ids:
        return ids[0] == ids[1]
    near, far = ({link.far_pci for link in gpu.links or () if link.far == "switch" and link.up and link.far_pci}
                 for gpu in (one, other))
    return bool(near & far) or not near or not far
