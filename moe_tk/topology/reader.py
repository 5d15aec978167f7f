"""Takes a TopologySnapshot: NVML in this process, CUDA in a child, files for the rest. Never raises."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from moe_tk.topology.child import run_child
from moe_tk.topology.facts import GpuFacts, HostFacts, PairFacts, Problem, ToolFact, TopologySnapshot
from moe_tk.topology.host import Files, nvidia_pci_devices, read_host
from moe_tk.topology.nvml import Nvml, normal_pci, open_nvml, text
from moe_tk.topology.read_gpus import read_gpus
from moe_tk.topology.read_pairs import read_pairs
from moe_tk.topology.visible import Visible, resolve_visible

CUDA_LIMIT_S = 60.0  # cuInit of eight GPUs without persistence takes more than ten seconds


def query_cuda(environ: Mapping[str, str], limit_s: float = CUDA_LIMIT_S) -> dict[str, Any]:
    """What the CUDA driver says, asked in a child process: this one never initialises CUDA and stays fit to fork."""
    script = Path(__file__).with_name("cuda_child.py")
    ended = run_child([sys.executable, "-I", str(script)], limit_s, env=environ)
    empty: dict[str, Any] = {"devices": [], "peers": []}
    if ended.how in ("timeout", "stuck"):
        return {**empty, "state": "failed", "error": f"the CUDA driver did not answer within {limit_s:g} s"}
    try:
        return json.loads(ended.stdout)
    except ValueError:
        return {**empty, "state": "failed", "error": ended.last_words or f"the child ended with status {ended.status}"}


def take_snapshot(environ: Mapping[str, str], *, tools: Iterable[ToolFact] = (), version: str | None = None,
                  files: Files | None = None, nvml: Callable[[], Nvml] = open_nvml,
                  cuda: Callable[[Mapping[str, str]], dict[str, Any]] = query_cuda) -> TopologySnapshot:
    """Read this machine. `files`, `nvml` and `cuda` let tests show another one."""
    files = files or Files()
    binding = nvml()
    read = read_gpus(binding, files)
    answers = cuda(environ)
    gpus = [facts for gpu in read for facts in (gpu.facts, *(slice_.facts for slice_ in gpu.slices))]
    visible = resolve_visible(environ.get("CUDA_VISIBLE_DEVICES"), [gpu.uuid for gpu in gpus],
                              len(read) if binding.usable else None)
    gpus = _mark_visible(_merge_cuda(gpus, answers), answers, visible)
    pairs = _merge_peers(read_pairs(binding, read), gpus, answers)
    host = _host(binding, answers, files, environ, gpus)
    problems = _problems(binding, answers, host, visible, len(read))
    failed = tuple(dict.fromkeys(str(failure) for failure in binding.failures))
    binding.close()
    return TopologySnapshot(
        moe_tk=version, taken_at=datetime.now(timezone.utc).isoformat(timespec="seconds"), host=host,
        gpus=tuple(gpus), pairs=tuple(pairs), tools=tuple(tools), problems=tuple(problems), failed_calls=failed)


def _merge_cuda(gpus: list[GpuFacts], answers: dict[str, Any]) -> list[GpuFacts]:
    """CUDA's devices onto NVML's GPUs, by UUID, else by PCI id; never by index."""
    merged = list(gpus)
    for device in answers["devices"]:
        place = _find(merged, device)
        known = merged[place] if place is not None else GpuFacts(f"GPU-{device.get('uuid', 'unknown')}", mig_parent="")
        facts = dataclasses.replace(
            known, cuda_index=device["index"], name=known.name or device.get("name"),
            pci=known.pci or normal_pci(device.get("pci")),
            arch=known.arch or _arch(device), memory_bytes=known.memory_bytes or device.get("memory_bytes"),
            sm_count=device.get("sm_count") or known.sm_count, shared_per_block=device.get("shared_per_block"),
            multicast=_bool(device.get("multicast")))
        if place is None:
            merged.append(facts)
        else:
            merged[place] = facts
    return merged


def _find(gpus: list[GpuFacts], device: dict[str, Any]) -> int | None:
    uuid = device.get("uuid")
    for place, gpu in enumerate(gpus):
        if uuid and gpu.uuid.lower() in (f"gpu-{uuid}".lower(), f"mig-{uuid}".lower()):
            return place
    pci = normal_pci(device.get("pci"))
    places = [i for i, gpu in enumerate(gpus) if pci and gpu.pci == pci and gpu.cuda_index is None]
    slices = [i for i in places if gpus[i].is_slice]
    places = slices or [i for i in places if not gpus[i].mig_enabled]
    return places[0] if len(places) == 1 else None


def _arch(device: dict[str, Any]) -> str | None:
    major, minor = device.get("major"), device.get("minor")
    return None if major is None or minor is None else f"sm_{major}{minor}"


def _bool(value: Any) -> bool | None:
    return None if value is None else bool(value)


def _mark_visible(gpus: list[GpuFacts], answers: dict[str, Any], visible: Visible) -> list[GpuFacts]:
    """A GPU is visible when CUDA shows it; without CUDA's answer, as far as the variable's text tells."""
    if answers["state"] in ("ok", "no-device"):
        return [dataclasses.replace(gpu, visible=gpu.cuda_index is not None) for gpu in gpus]
    if visible.state == "empty":
        return [dataclasses.replace(gpu, visible=False) for gpu in gpus]
    if visible.state == "ok" and None not in visible.uuids:
        return [dataclasses.replace(gpu, visible=gpu.uuid in visible.uuids) for gpu in gpus]
    shown = True if visible.state == "unset" else None
    return [dataclasses.replace(gpu, visible=False if gpu.mig_enabled and not gpu.is_slice else shown) for gpu in gpus]


def _merge_peers(pairs: list[PairFacts], gpus: list[GpuFacts], answers: dict[str, Any]) -> list[PairFacts]:
    by_index = {gpu.cuda_index: gpu.uuid for gpu in gpus if gpu.cuda_index is not None}
    merged = {(pair.a, pair.b): pair for pair in pairs}
    for peer in answers["peers"]:
        one, other = by_index.get(peer["from"]), by_index.get(peer["to"])
        if one is None or other is None:
            continue
        access, atomics = _bool(peer.get("access")), _bool(peer.get("native_atomics"))
        if (other, one) in merged:
            pair = merged[other, one]
            merged[other, one] = dataclasses.replace(pair, peer_access_back=access)
        else:
            pair = merged.get((one, other), PairFacts(one, other))
            merged[one, other] = dataclasses.replace(pair, peer_access=access, native_atomics=atomics)
    return list(merged.values())


def _host(nvml: Nvml, answers: dict[str, Any], files: Files, environ: Mapping[str, str],
          gpus: list[GpuFacts]) -> HostFacts:
    on_bus = nvidia_pci_devices(files)
    devices = files.exists("dev/nvidiactl") or files.exists("dev/dxg")
    version = answers.get("version")
    driver = text(nvml.ask("nvmlSystemGetDriverVersion")) if nvml.usable else None
    return dataclasses.replace(
        read_host(files, environ, [gpu.pci for gpu in gpus if gpu.pci and not gpu.is_slice] or on_bus),
        driver=driver,
        nvml_version=text(nvml.ask("nvmlSystemGetNVMLVersion")) if nvml.usable else None,
        nvml_library=nvml.library, nvml_state=nvml.state, nvml_error=nvml.error,
        cuda_version=f"{version // 1000}.{version % 1000 // 10}" if version else None,
        cuda_state=answers["state"], cuda_error=answers.get("error", ""),
        nvidia_hardware=bool(gpus or on_bus or devices))


def _problems(nvml: Nvml, answers: dict[str, Any], host: HostFacts, visible: Visible, count: int) -> list[Problem]:
    """What went wrong while reading. On a machine without NVIDIA hardware nothing did."""
    found = []
    value = host.visible_devices if host.visible_devices_set else None
    if visible.state == "empty":
        found.append(Problem("visible-empty", {"value": value}))
    elif visible.state == "bad":
        found.append(Problem("visible-bad-entry", {
            "value": value, "entry": visible.bad, "why": visible.why, "used": list(visible.entries), "count": count}))
    if not host.nvidia_hardware:
        return found
    if not nvml.usable:
        found.append(Problem(nvml.state, {
            "error": nvml.error, "tried": list(nvml.tried), "module": host.driver_module,
            "cuda": answers["state"], "wsl": bool(host.wsl)}))
    if answers["state"] == "no-library":
        found.append(Problem("cuda-library-missing", {"error": answers.get("error", "")}))
    elif answers["state"] == "failed":
        found.append(Problem("cuda-failed", {"error": answers.get("error", ""), "module": host.driver_module}))
    elif answers["state"] == "no-device" and visible.state in ("unset", "ok"):
        found.append(Problem("cuda-no-device", {"error": answers.get("error", ""), "count": count}))
    return found
