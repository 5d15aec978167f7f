"""Record this machine in the form of tests/fixtures/machines: python tests/doctor/record_machine.py "about" > FILE.json

Needs nvidia-ml-py and a driver. Host name and serial numbers are left out.
"""

from __future__ import annotations

import collections
import itertools
import json
import os
import sys

from moe_tk.topology import nvml as n
from moe_tk.topology.host import Files, numa_node
from moe_tk.topology.read_gpus import read_gpus
from moe_tk.topology.reader import query_cuda

STATUS = {"ok": "OK", "chipset-not-supported": "CNS", "gpu-not-supported": "GNS", "topology-not-supported": "TNS",
          "disabled-by-regkey": "DR", "not-supported": "NS"}
FILES = ("proc/version", "proc/1/cgroup", "proc/cmdline", "proc/driver/nvidia/version")


def record(about: str) -> dict:
    files, binding = Files(), n.open_nvml()
    read = read_gpus(binding, files)
    cuda = query_cuda({key: value for key, value in os.environ.items() if key != "CUDA_VISIBLE_DEVICES"})
    by_uuid = {f"GPU-{device.get('uuid')}": device for device in cuda["devices"]}
    gpus = []
    for gpu in read:
        facts, device = gpu.facts, by_uuid.get(gpu.facts.uuid, {})
        bundles = collections.Counter((link.far, link.far_pci, link.version, link.up) for link in gpu.links or ())
        entry = {"uuid": facts.uuid, "name": facts.name, "pci": facts.pci, "arch": facts.arch,
                 "memory_mib": (facts.memory_bytes or 0) >> 20, "pcie_gen": facts.pcie_gen,
                 "pcie_gen_max": facts.pcie_gen_max, "pcie_width": facts.pcie_width,
                 "pcie_width_max": facts.pcie_width_max, "ecc": facts.ecc, "mig": facts.mig_enabled,
                 "numa": numa_node(files, facts.pci or ""), "sm_count": device.get("sm_count"),
                 "shared_per_block": device.get("shared_per_block"), "multicast": device.get("multicast"),
                 "fabric": None if facts.fabric_state in (None, "none") else {"state": facts.fabric_state},
                 "nvlink": [{key: value for key, value in (("far", far), ("to", to), ("version", version), ("up", up),
                                                           ("count", count)) if value is not None}
                            for (far, to, version, up), count in bundles.items()]}
        gpus.append({key: value for key, value in entry.items() if value is not None})
    pairs = {}
    levels = {10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}
    for (i, one), (j, other) in itertools.combinations(enumerate(read), 2):
        level = binding.ask("nvmlDeviceGetTopologyCommonAncestor", one.handle, other.handle)
        pair = {"ancestor": levels.get(level)}
        for name, index in (("read", 0), ("write", 1), ("nvlink", 2), ("atomics", 3), ("pci", 4)):
            value, _ = binding.try_ask("nvmlDeviceGetP2PStatus", one.handle, other.handle, index)
            pair[name] = STATUS.get(n.P2P_STATUS.get(value, ""))
        pairs[f"{i}-{j}"] = {key: value for key, value in pair.items() if value is not None}
    order = [next(i for i, gpu in enumerate(gpus) if gpu["uuid"] == f"GPU-{device.get('uuid')}")
             for device in cuda["devices"]]
    return {"about": about, "sources": ["read on that machine by tests/doctor/record_machine.py"],
            "placeholders": ["boot id"], "driver": n.text(binding.ask("nvmlSystemGetDriverVersion")),
            "cuda": {"version": cuda.get("version"), "order": order}, "gpus": gpus, "every_pair": {}, "pairs": pairs,
            "cuda_peers": cuda["peers"],
            "host": {"files": {"proc/sys/kernel/random/boot_id": "00000000-0000-4000-8000-000000000000\n",
                               **{name: text for name in FILES if (text := files.text(name)) is not None}}}}


if __name__ == "__main__":
    print(json.dumps(record(sys.argv[1] if len(sys.argv) > 1 else "a machine"), indent=1))
