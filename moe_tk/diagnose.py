"""The doctor as a function: `diagnose` for this machine, `doctor` for the ranks of a process group.

Neither initialises CUDA in the calling process: the driver is asked, and probes run, in child processes.
"""

from __future__ import annotations

import dataclasses
import logging
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import moe_tk
from moe_tk.config import environment
from moe_tk.errors import ArgumentError, TopologyError
from moe_tk.topology.cache import cache_key, load_cached, store_cached
from moe_tk.topology.facts import Problem, TopologySnapshot, short_uuid
from moe_tk.topology.findings import Finding, finding
from moe_tk.topology.probe import DEPTHS, ProbesNotRun, run_probes
from moe_tk.topology.probe_run import Limits
from moe_tk.topology.probes import ProbeResults
from moe_tk.topology.reader import take_snapshot
from moe_tk.topology.report import Report, make_report
from moe_tk.topology.verdict import decide
from moe_tk.topology.wishes import chosen_protocol

_log = logging.getLogger("moe_tk")


def read_machine(environ: Mapping[str, str] | None = None) -> TopologySnapshot:
    """Snapshot of this machine with its toolchain. Never raises for what it reads."""
    from moe_tk.diagnose_tools import read_tools

    snapshot = take_snapshot(environ or environment(), version=moe_tk.__version__)
    archs = sorted({gpu.arch for gpu in snapshot.gpus if gpu.arch and gpu.visible is not False})
    tools, problems = read_tools(archs)
    problems = [Problem(p.id, {**p.inputs, "cuda": snapshot.host.cuda_version}) if p.id == "torch-without-cuda" else p
                for p in problems]
    if _in_bad_fork():
        problems.append(Problem("bad-fork"))
    return dataclasses.replace(snapshot, tools=tuple(tools), problems=(*snapshot.problems, *problems))


def _in_bad_fork() -> bool:
    """Was this process forked from one that had initialised CUDA? Only torch knows, and only if it is loaded."""
    torch = sys.modules.get("torch")
    check = getattr(getattr(torch, "cuda", None), "_is_in_bad_fork", None)
    return bool(check and check())


def cache_places() -> list[Path]:
    """Folders where verdicts are kept: up to the first that can be written, so that a fresh one is really fresh."""
    from moe_tk.builder.cache import cache_folders

    places = []
    for folder in cache_folders():
        if folder.problem is None or folder.source != "temp":  # a temp folder of somebody else is not trusted
            places.append(folder.path)
        if folder.problem is None:
            break
    return places


def diagnose(*, probe: str | None = None, world: int | None = None, uuids: Sequence[str] | None = None,
             protocol: str | None = None, group_size: int | None = None, use_cache: bool = True,
             allow_shared: bool = False, limits: Limits = Limits(), snapshot: TopologySnapshot | None = None,  # noqa: B008
             environ: Mapping[str, str] | None = None,
             progress: Callable[[int, int, dict[str, Any]], None] | None = None) -> Report:
    """Report on this machine. probe: None (use what is kept), "quick" or "full". protocol overrides MOE_TK_PROTOCOL.

    uuids: the GPUs of the group in rank order (default: the first `world` visible ones, or all). use_cache: False
    neither reads nor trusts earlier probes (new ones are still kept). Raises ArgumentError for wrong arguments.
    """
    if probe not in (None, *DEPTHS):
        raise ArgumentError(f"probe {probe!r}: wanted None, {', '.join(DEPTHS)}")
    began = time.monotonic()
    environ = environ or environment()
    snapshot = snapshot or read_machine(environ)
    group = decide(snapshot, world=world, uuids=uuids).uuids
    probes, origin, extra = _evidence(snapshot, group, environ, probe, use_cache, limits, progress)
    wish, by = chosen_protocol(protocol)
    return make_report(snapshot, probes, world=world, uuids=uuids, override=wish, override_by=by, group_size=group_size,
                       allow_shared=allow_shared, extra=extra, seconds=time.monotonic() - began, **origin)


def _evidence(snapshot: TopologySnapshot, group: Sequence[str], environ: Mapping[str, str], depth: str | None,
              use_cache: bool, limits: Limits, progress: Callable[[int, int, dict[str, Any]], None] | None
              ) -> tuple[ProbeResults | None, dict[str, Any], list[Finding]]:
    """Probes of the group: fresh ones when asked for, else kept ones; with their origin, and why there are none."""
    key = cache_key(snapshot, group)
    if depth is None:
        cached = load_cached(key, cache_places()) if key and use_cache else None
        if cached is None:
            return None, {}, []
        return cached.probes, {"probe_age_s": cached.age_s, "probe_path": str(cached.path)}, []
    if len(set(group)) < 1 or decide(snapshot, uuids=group).protocol == "shm":
        return None, {}, [finding("probe-left-out", what="there is no GPU to probe")]
    try:
        probes = run_probes(snapshot, list(dict.fromkeys(group)), environ, depth=depth, limits=limits,
                            progress=progress, torch_cuda=_torch_has_cuda(snapshot), version=moe_tk.__version__)
    except ProbesNotRun as error:
        return None, {}, [finding("probes-not-run", why=str(error), fix=error.fix)]
    path = store_cached(key, probes, cache_places()) if key else None
    return probes, {"probe_path": str(path) if path else None}, []


def _torch_has_cuda(snapshot: TopologySnapshot) -> bool:
    return any(tool.what == "torch" and tool.chosen and tool.note.startswith("CUDA") for tool in snapshot.tools)


def doctor(group: Any = None, *, device: int | None = None, probe: str | None = None, protocol: str | None = None,
           use_cache: bool = True, allow_shared: bool = False) -> Report:
    """The doctor's report for the ranks of `group`, the same on every rank; for this machine alone without a group.

    group: a ProcessGroup or one-dimensional DeviceMesh; every rank of it must call this. None means the default group
    if torch.distributed is initialised, else no group. device: CUDA index of this
    rank's GPU (default: torch's current device if CUDA is initialised, else LOCAL_RANK, else the only visible one).
    probe: None uses what is kept from earlier probes, "quick" or "full" runs them on rank 0. allow_shared: two ranks
    may share a GPU (emulation).

    Raises TopologyError on every rank when two ranks have one GPU (naming both and it), when ranks are on different
    machines, or when only some have a GPU.
    """
    group = _default_group() if group is None else group
    if group is None:
        return diagnose(probe=probe, protocol=protocol, use_cache=use_cache)
    from moe_tk.diagnose_group import gather

    own = read_machine()
    with gather(group) as ranks:
        cards = ranks.all({"uuid": _own_uuid(own, device), "boot_id": own.host.boot_id, "hostname": own.host.hostname,
                           "parent": _own_parent(own, device)})
        check_ranks(cards, allow_shared)
        uuids = [card["uuid"] for card in cards]

        def make() -> Report:
            if uuids[0] is None:
                wish, by = chosen_protocol(protocol)
                return make_report(own, world=len(cards), uuids=(), override=wish, override_by=by)
            environ = {**environment(), "CUDA_VISIBLE_DEVICES": ",".join(dict.fromkeys(uuids))}
            return diagnose(probe=probe, uuids=uuids, protocol=protocol, use_cache=use_cache, allow_shared=allow_shared,
                            environ=environ)

        report = ranks.from_first(make)
        if ranks.rank == 0 and report.verdict.protocol == "nvlink" and report.verdict.multicast is not True:
            _log.info("moe_tk: multicast variants stay off: %s", report.verdict.multicast_why)
    return report


def _default_group() -> Any:
    dist = sys.modules.get("torch.distributed")
    return dist.group.WORLD if dist is not None and dist.is_available() and dist.is_initialized() else None


def check_ranks(cards: Sequence[Mapping[str, Any]], allow_shared: bool = False) -> None:
    """Raise TopologyError for ranks that cannot form a group. cards: uuid, parent, boot_id, hostname of each rank."""
    hosts = {card["boot_id"] or card["hostname"] for card in cards}
    if len(hosts) > 1:
        names = ", ".join(f"rank {rank} on {card['hostname']}" for rank, card in enumerate(cards))
        raise TopologyError(f"the ranks are on {len(hosts)} machines ({names}); a group must be on one machine")
    without = [rank for rank, card in enumerate(cards) if card["uuid"] is None]
    if without and len(without) < len(cards):
        raise TopologyError(f"ranks {', '.join(map(str, without))} see no GPU, the others do: give every rank a GPU, "
                            f"or "
                            "hide the GPUs from all for the CPU backend")
    if allow_shared or without:
        return
    taken: dict[str, int] = {}
    for rank, card in enumerate(cards):
        physical = card["parent"] or card["uuid"]
        if physical in taken:
            first = taken[physical]
            what = "two MIG slices of one GPU" if card["parent"] else "one GPU"
            raise TopologyError(
                f"ranks {first} and {rank} are on {what}, {physical}: each rank needs a GPU of its own. Set the "
                f"device from "
                "LOCAL_RANK, or one CUDA_VISIBLE_DEVICES per rank; to emulate ranks on one GPU, pass "
                "allow_shared=True.")
        taken[physical] = rank


def _own_uuid(snapshot: TopologySnapshot, device: int | None) -> str | None:
    """UUID of the GPU that this rank uses, None without any. Raises ArgumentError when nothing says which one."""
    shown = {gpu.cuda_index: gpu.uuid for gpu in snapshot.gpus if gpu.cuda_index is not None}
    if not shown or snapshot.host.cuda_state != "ok":
        return None
    index = device if device is not None else _current_device()
    if index is None and len(shown) == 1:
        index = next(iter(shown))
    if index is None:
        text = environment().get("LOCAL_RANK", "")
        index = int(text) if text.isdigit() else None
    if index is None:
        raise ArgumentError(f"{len(shown)} GPUs are visible and nothing says which one this rank uses: pass device=, "
                            f"call "
                            "torch.cuda.set_device(), or set LOCAL_RANK")
    if index not in shown:
        listed = ", ".join(f"{i} ({short_uuid(uuid)})" for i, uuid in sorted(shown.items()))
        raise ArgumentError(f"device {index} does not exist: visible are {listed}")
    return shown[index]


def _own_parent(snapshot: TopologySnapshot, device: int | None) -> str:
    uuid = _own_uuid(snapshot, device)
    return "" if uuid is None else snapshot.gpu(uuid).mig_parent or ""


def _current_device() -> int | None:
    """torch's current device, if CUDA is already initialised in this process; asking must not initialise it."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    return torch.cuda.current_device()
