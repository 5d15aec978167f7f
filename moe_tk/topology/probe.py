"""Functional probes of a group of GPUs: build, run in children, gather into ProbeResults. No CUDA in this process."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone

from moe_tk.errors import BuildError
from moe_tk.topology.facts import GpuFacts, TopologySnapshot
from moe_tk.topology.probe_plan import HOST as HOST_DEVICE
from moe_tk.topology.probe_plan import Step, full_steps, quick_steps
from moe_tk.topology.probe_run import Limits, StepResult, run_steps
from moe_tk.topology.probes import HOST, Check, Interference, ProbeResults, Rate

DEPTHS = ("quick", "full")


class ProbesNotRun(Exception):
    """Why no probe could be started; `fix` says what to do."""

    def __init__(self, why: str, fix: str) -> None:
        super().__init__(why)
        self.fix = fix


def build_probe_library(archs: Sequence[str]) -> str:
    """Path of the probe library with an image for each arch ("sm_90", ...). Raises ProbesNotRun."""
    from moe_tk.builder.arch import parse_arch
    from moe_tk.builder.build import build_cuda_module
    from moe_tk.builder.native_root import PROBE_MODULE, native_modules

    try:
        images = list(dict.fromkeys(parse_arch(arch) for arch in sorted(archs)))
        if not images:
            raise ProbesNotRun("the architecture of the GPUs is unknown", "see the nvml- and cuda- entries")
        more = [flag for image in images[1:] for flag in image.nvcc_flags]
        module = next((module for module in native_modules() if module.name == PROBE_MODULE), None)
        if module is None:
            raise ProbesNotRun("the sources of the probes are missing (tk_kernels/probe)", "reinstall moe-tk")
        return str(build_cuda_module(module.name, module.sources, arch=images[0].name, extra_flags=more))
    except BuildError as error:
        raise ProbesNotRun(str(error).partition("\n")[0], "make the build work: the message says how; "
                           "or build ahead elsewhere and copy the cache folder") from error


def run_probes(snapshot: TopologySnapshot, uuids: Sequence[str], environ: Mapping[str, str], *, depth: str = "full",
               limits: Limits = Limits(), library: str | None = None, torch_cuda: bool = False,  # noqa: B008
               command: Sequence[str] | None = None, version: str | None = None,
               progress: Callable[[int, int, Step], None] | None = None) -> ProbeResults:
    """Probe the GPUs `uuids` with each other. torch_cuda: torch can be used for the GEMM of the interference probe.

    Children see exactly these GPUs, by UUID and in this order. Raises ProbesNotRun when nothing could be started.
    """
    gpus = [snapshot.gpu(uuid) for uuid in uuids]
    if any(gpu.is_slice for gpu in gpus):
        raise ProbesNotRun("MIG slices have no peer access to probe", "use whole GPUs")
    if len(set(uuids)) != len(uuids) or not uuids:
        raise ProbesNotRun("probes need GPUs that all differ", "name every GPU once")
    library = library or build_probe_library(sorted({gpu.arch for gpu in gpus if gpu.arch}))
    steps = _plan(snapshot, gpus, depth, torch_cuda)
    child_environ = {**environ, "CUDA_VISIBLE_DEVICES": ",".join(uuids)}
    began = time.monotonic()
    results = run_steps(steps, library=library, devices=len(uuids), environ=child_environ, limits=limits,
                        command=command, progress=progress)
    if results and all(result.how == "skipped" for result in results):
        raise ProbesNotRun(results[0].text, "read the text; nvidia-smi shows whether the GPUs are free")
    return _gather(snapshot, uuids, results, depth, limits, time.monotonic() - began, version)


def _plan(snapshot: TopologySnapshot, gpus: Sequence[GpuFacts], depth: str, torch_cuda: bool) -> list[Step]:
    bulk = [bool(gpu.arch and int(gpu.arch[3:]) >= 90) for gpu in gpus]
    linked = [(i, j) for i, j in itertools.combinations(range(len(gpus)), 2)
              if snapshot.pair(gpus[i].uuid, gpus[j].uuid).claimed is not False]
    if depth == "quick":
        return quick_steps(len(gpus), bulk, linked)
    sm_count = min((gpu.sm_count for gpu in gpus if gpu.sm_count), default=16)
    return full_steps(len(gpus), bulk, linked, sm_count, torch_cuda)


def _gather(snapshot: TopologySnapshot, uuids: Sequence[str], results: Sequence[StepResult], depth: str, limits: Limits,
            seconds: float, version: str | None) -> ProbeResults:
    def name(device: int) -> str:
        return HOST if device == HOST_DEVICE else uuids[device]

    checks, rates, interference, notes = [], [], [], []
    for result in results:
        kind = result.step["do"]
        if kind in ("verify", "signal", "atomics"):
            checks.append(_check(result, name))
        elif result.how != "ok":
            notes.append(f"{_describe(result.step, name, snapshot)}: {result.text}")
        elif kind == "rate":
            rates += _rates(result, name, len(uuids))
        elif kind == "copy":
            rates += _copies(result, name)
        else:
            interference += _interference(result, name)
    return ProbeResults(
        moe_tk=version, taken_at=datetime.now(timezone.utc).isoformat(timespec="seconds"), uuids=tuple(sorted(uuids)),
        driver=snapshot.host.driver or snapshot.host.driver_module, boot_id=snapshot.host.boot_id, depth=depth,
        limit_s=limits.step_s, seconds=seconds, checks=tuple(checks), rates=tuple(rates),
        interference=tuple(interference), notes=tuple(dict.fromkeys(notes)))


def _check(result: StepResult, name: Callable[[int], str]) -> Check:
    step, data = result.step, result.data
    status = data.get("status", result.how)
    if result.how == "error" and "no peer access" in result.text:
        status = "refused"
    return Check(
        kind=step.get("kind", step["do"]), src=name(step["src"]), dst=name(step["dst"]), status=status,
        engine=step.get("engine", ""), detail=data.get("detail", result.text), value=data.get("value"),
        offset=data.get("offset"), seen=data.get("seen"), wanted=data.get("wanted"), bad_words=data.get("bad_words"),
        sent=data.get("sent"), counted=data.get("counted"), seconds=round(result.seconds, 4))


def _rates(result: StepResult, name: Callable[[int], str], count: int) -> list[Rate]:
    found = []
    load = result.step["load"]
    for mover, gbs in zip(result.step["movers"], result.data["gbs"], strict=True):
        common = (mover["op"], mover["engine"], mover["payload"], mover["sms"])
        to = "all" if load == "all" and mover["peers"] != [HOST_DEVICE] else name(mover["peers"][0])
        found.append(Rate(name(mover["device"]), to, *common, load, round(gbs, 3)))
        if count == 2 and load == "both-ways":  # two GPUs: both ways is everybody with everybody
            found.append(Rate(name(mover["device"]), "all", *common, "all", round(gbs, 3)))
    return found


def _copies(result: StepResult, name: Callable[[int], str]) -> list[Rate]:
    found = []
    for (source, target), gbs in zip(result.step["jobs"], result.data["gbs"], strict=True):
        pull = source == HOST_DEVICE
        src, dst, op = (target, source, "pull") if pull else (source, target, "push")
        found.append(Rate(name(src), name(dst), op, "copy-engine", "copy", 0, result.step["load"], round(gbs, 3)))
    return found


def _interference(result: StepResult, name: Callable[[int], str]) -> list[Interference]:
    step, data = result.step, result.data
    shape = "x".join(str(size) for size in step["shape"])
    found = []
    for place, device in enumerate(step["devices"]):
        mover = step["movers"][place] if step["movers"] else None
        found.append(Interference(
            name(device), mover["sms"] if mover else 0, mover["op"] if mover else "none",
            mover["engine"] if mover else "", round(data["parked_us"][place], 2), round(data["gemm_us"][place], 2),
            round(data["gbs"][place], 2) if mover else 0.0, shape))
    return found


def _describe(step: Step, name: Callable[[int], str], snapshot: TopologySnapshot) -> str:
    if step["do"] == "gemm":
        movers = step["movers"]
        return f"GEMM beside {movers[0]['sms']} SMs ({movers[0]['op']})" if movers else "GEMM alone"
    if step["do"] == "copy":
        return f"copy engine, {step['load']}"
    mover = step["movers"][0]
    return f"{mover['op']} by {mover['engine']}, {mover['sms']} SMs, {step['load']}"
