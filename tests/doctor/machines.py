"""Recorded machines: JSON files of public facts, replayed by a fake NVML, a fake CUDA child and a fake file tree."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

from fake_nvml import FakeNvml

from moe_tk.topology.facts import TopologySnapshot
from moe_tk.topology.host import Files
from moe_tk.topology.nvml import Nvml, open_nvml
from moe_tk.topology.probes import HOST, Check, ProbeResults, Rate
from moe_tk.topology.reader import take_snapshot

FOLDER = Path(__file__).parent.parent / "fixtures" / "machines"
NAMES = sorted(path.stem for path in FOLDER.glob("*.json"))


def load(name: str) -> dict[str, Any]:
    """A fresh copy of a recorded machine, with `nvlink` written out as one entry per link slot."""
    return expand(json.loads((FOLDER / f"{name}.json").read_text()))


def expand(machine: dict[str, Any]) -> dict[str, Any]:
    machine = copy.deepcopy(machine)
    for gpu in machine["gpus"]:
        links: list[dict[str, Any] | None] = []
        for bundle in gpu.pop("nvlink", []):
            links += [{key: value for key, value in bundle.items() if key != "count"} for _ in range(bundle["count"])]
        gpu.setdefault("links", links)
    return machine


def snapshot(machine: dict[str, Any] | str, tmp_path: Path, environ: dict[str, str] | None = None,
             binding: FakeNvml | None = None) -> TopologySnapshot:
    """What the reader sees on that machine."""
    machine = load(machine) if isinstance(machine, str) else machine
    fake = binding or FakeNvml(machine)
    return take_snapshot(environ or {}, files=Files(file_tree(machine, tmp_path)), nvml=lambda: opened(fake),
                         cuda=lambda env: cuda_answers(machine, env))


def opened(fake: FakeNvml) -> Nvml:
    return open_nvml(load_binding=lambda: fake, load_library=fake.load_library, exists=fake.exists)


def file_tree(machine: dict[str, Any], tmp_path: Path) -> Path:
    root = tmp_path / "root"
    for name, text in machine.get("host", {}).get("files", {}).items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for gpu in machine["gpus"]:
        folder = root / "sys/bus/pci/devices" / gpu.get("pci", "none")
        folder.mkdir(parents=True, exist_ok=True)
        if "numa" in gpu:
            (folder / "numa_node").write_text(f"{gpu['numa']}\n")
    root.mkdir(exist_ok=True)
    return root


def cuda_answers(machine: dict[str, Any], environ: dict[str, str]) -> dict[str, Any]:
    """What the CUDA child would print, with CUDA's own rule for CUDA_VISIBLE_DEVICES: stop at the first bad entry."""
    cuda = machine.get("cuda", {})
    if cuda.get("state", "ok") != "ok":
        return {"state": cuda["state"], "error": cuda.get("error", ""), "version": cuda.get("version"), "devices": [],
                "peers": []}
    order = cuda.get("order", list(range(len(machine["gpus"]))))
    if environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID":
        order = sorted(order)
    enumerated = [machine["gpus"][place] for place in order]
    shown = _visible(enumerated, environ.get("CUDA_VISIBLE_DEVICES"))
    devices = []
    for index, gpu in enumerate(shown):
        parent = gpu.get("_parent", gpu)
        major, minor = divmod(int(parent["arch"].removeprefix("sm_")), 10)
        devices.append({"index": index, "uuid": gpu["uuid"].split("-", 1)[1], "pci": parent["pci"],
                        "name": gpu["name"], "major": major, "minor": minor, "sm_count": gpu.get("sm_count"),
                        "memory_bytes": gpu["memory_mib"] << 20 if "memory_mib" in gpu else None,
                        "shared_per_block": gpu.get("shared_per_block"), "multicast": gpu.get("multicast")})
    peers = []
    for one, left in enumerate(shown):
        for other, right in enumerate(shown):
            if one != other:
                access = _access(machine, left, right)
                peers.append({"from": one, "to": other, "access": access, "native_atomics": None})
    return {"state": "ok" if devices else "no-device", "error": "" if devices else "CUDA_ERROR_NO_DEVICE",
            "version": cuda.get("version"), "devices": devices, "peers": peers}


def _visible(gpus: list[dict[str, Any]], value: str | None) -> list[dict[str, Any]]:
    slices = [{**cut, "_parent": gpu} for gpu in gpus if gpu.get("mig") for cut in gpu.get("slices", [])]
    whole = [gpu for gpu in gpus if not gpu.get("mig")]
    if value is None:
        return slices[:1] or whole if slices else whole  # with MIG on, CUDA shows a single slice and nothing else
    shown = []
    for part in value.split(","):
        part = part.strip()
        if part.isdigit() and int(part) < len(gpus):
            candidate = gpus[int(part)]
        elif part.startswith(("GPU-", "MIG-")):
            matching = [gpu for gpu in [*gpus, *slices] if gpu["uuid"].startswith(part)]
            if len(matching) != 1:
                break
            candidate = matching[0]
        else:
            break
        shown.append(candidate)
    return shown


def _access(machine: dict[str, Any], one: dict[str, Any], other: dict[str, Any]) -> int:
    if "_parent" in one or "_parent" in other:
        return 0
    if "cuda_peer" in machine:
        return int(machine["cuda_peer"])
    places = sorted(next(i for i, gpu in enumerate(machine["gpus"]) if gpu is end) for end in (one, other))
    pair = {**machine.get("every_pair", {}), **machine.get("pairs", {}).get(f"{places[0]}-{places[1]}", {})}
    return int(pair.get("read") == "OK" and pair.get("write") == "OK")


def passing(snapshot: TopologySnapshot, uuids: list[str] | None = None, **fields: Any) -> ProbeResults:
    """Probes in which everything that the driver claims works."""
    group = uuids or [gpu.uuid for gpu in snapshot.visible]
    checks = []
    for one in group:
        for other in group:
            if one != other and snapshot.pair(one, other).claimed is not False:
                checks += [Check(kind, one, other, "ok", engine="words") for kind in ("push", "pull")]
    return ProbeResults(uuids=tuple(sorted(group)), driver=snapshot.host.driver, boot_id=snapshot.host.boot_id,
                        depth="quick", limit_s=20.0, checks=tuple(checks), **fields)


def recorded_rates(machine: dict[str, Any]) -> tuple[Rate, ...]:
    """The measured numbers of a recorded machine."""
    def name(end: int | str) -> str:
        return machine["gpus"][end]["uuid"] if isinstance(end, int) else HOST if end == "host" else end

    return tuple(Rate(name(r["src"]), name(r["dst"]), r["op"], r["engine"], r.get("payload", "copy"), r["sms"],
                      r["load"], r["gbs"]) for r in machine.get("rates", []))


def with_check(probes: ProbeResults, src: str, dst: str, **changed: Any) -> ProbeResults:
    """The same probes, but those of src -> dst with other fields."""
    import dataclasses

    checks = tuple(dataclasses.replace(c, **changed) if (c.src, c.dst) == (src, dst) else c for c in probes.checks)
    return dataclasses.replace(probes, checks=checks)
