"""Which probes run, in which order: plain steps for the probe child. Pure; devices are positions in a group."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

HOST = -1
VERIFY_BYTES = 8 << 20
RATE_BYTES, HOST_BYTES, COPY_BYTES = 128 << 20, 32 << 20, 256 << 20
SIGNAL_ROUNDS = 2000
INCREMENTS = 2000  # per thread, 2048 threads per source
SM_COUNTS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96)
FEW_SM_COUNTS = (1, 4, 16)
HOST_SM_COUNTS = (1, 2, 4, 8, 16)
INTERFERENCE_SM_COUNTS = (2, 4, 8, 16, 32)
GEMM = (8192, 8192, 8192)

Step = dict[str, Any]


def quick_steps(count: int, bulk: Sequence[bool], linked: Sequence[tuple[int, int]]) -> list[Step]:
    """Correctness and latency. bulk[i]: device i has bulk copies. linked: pairs i < j that may have peer access.

    Data first, signals second, atomics last: what fails first explains what fails later.
    """
    steps: list[Step] = []
    for one, other in linked:
        for src, dst in ((one, other), (other, one)):
            for kind, engine in itertools.product(("push", "pull"), ("words", "bulk")):
                if engine == "words" or bulk[src] and bulk[dst]:
                    steps.append({"do": "verify", "kind": kind, "engine": engine, "src": src, "dst": dst,
                                  "bytes": VERIFY_BYTES})
    steps += [{"do": "signal", "src": one, "dst": other, "rounds": SIGNAL_ROUNDS} for one, other in linked]
    for one, other in linked:
        for src, dst in ((one, other), (other, one)):
            steps.append({"do": "atomics", "src": src, "dst": dst, "sources": [src, dst], "increments": INCREMENTS})
    if count > 1:
        steps.append({"do": "atomics", "src": 0, "dst": HOST, "sources": list(range(count)), "increments": 100})
    return steps


def full_steps(count: int, bulk: Sequence[bool], linked: Sequence[tuple[int, int]], sm_count: int,
               torch_cuda: bool) -> list[Step]:
    """quick_steps, then bandwidth of every kind, then what moving costs a GEMM."""
    steps = quick_steps(count, bulk, linked)
    sweep = [*(n for n in SM_COUNTS if n < sm_count), sm_count]
    steps += _pair_rates(bulk, linked, sweep, count)
    if count > 2:
        steps += _all_rates(bulk, linked, sweep, count)
    steps += _copy_engine(count, linked)
    steps += _host_rates(count, bulk)
    if torch_cuda:
        steps += _interference(count, bulk, linked)
    return steps


def _engines(bulk: Sequence[bool], *devices: int) -> tuple[str, ...]:
    return ("words", "bulk") if all(bulk[d] for d in devices) else ("words",)


def _mover(device: int, op: str, engine: str, payload: str, sms: int, peers: Sequence[int]) -> Step:
    return {"device": device, "op": op, "engine": engine, "payload": payload, "sms": sms, "peers": list(peers)}


def _rate(load: str, movers: list[Step], size: int = RATE_BYTES) -> Step:
    return {"do": "rate", "load": load, "movers": movers, "bytes": size}


def _pair_rates(bulk: Sequence[bool], linked: Sequence[tuple[int, int]], sweep: Sequence[int],
                count: int) -> list[Step]:
    """Every pair alone, one way and both ways. Two GPUs get the whole sweep; more get a few SM counts each."""
    counts = sweep if count == 2 else FEW_SM_COUNTS
    payloads = ("copy", "wire") if count == 2 else ("copy",)
    steps = []
    for one, other in linked:
        engines = _engines(bulk, one, other)
        for engine, op, payload, sms in itertools.product(engines, ("push", "pull"), payloads, counts):
            forth = _mover(one, op, engine, payload, sms, [other])
            back = _mover(other, op, engine, payload, sms, [one])
            steps += [_rate("alone", [forth]), _rate("alone", [back]), _rate("both-ways", [forth, back])]
    return steps


def _all_rates(bulk: Sequence[bool], linked: Sequence[tuple[int, int]], sweep: Sequence[int], count: int) -> list[Step]:
    """Everybody with everybody they can reach; each GPU begins with the next one, so that nobody is hit by all."""
    reach = {i: [(i + k) % count for k in range(1, count)
                 if tuple(sorted((i, (i + k) % count))) in set(linked)] for i in range(count)}
    steps = []
    for engine, op, sms in itertools.product(_engines(bulk, *range(count)), ("push", "pull"), sweep):
        movers = [_mover(i, op, engine, "copy", sms, peers) for i, peers in reach.items() if peers]
        if len(movers) > 1:
            steps.append(_rate("all", movers, RATE_BYTES // 2))
    return steps


def _copy_engine(count: int, linked: Sequence[tuple[int, int]]) -> list[Step]:
    steps = []

    def add(load: str, *jobs: tuple[int, int]) -> None:
        steps.append({"do": "copy", "load": load, "jobs": [list(job) for job in jobs],
                      "bytes": COPY_BYTES if HOST not in itertools.chain(*jobs) else HOST_BYTES})

    for one, other in linked:
        add("alone", (one, other))
        add("alone", (other, one))
        add("both-ways", (one, other), (other, one))
    for device in range(count):
        add("alone", (device, HOST))
        add("alone", (HOST, device))
        add("duplex", (device, HOST), (HOST, device))
    if count > 1:
        add("all", *((d, HOST) for d in range(count)), *((HOST, d) for d in range(count)))
    return steps


def _host_rates(count: int, bulk: Sequence[bool]) -> list[Step]:
    """SM-driven copies to and from pinned host memory: alone, both ways at once, all GPUs both ways."""
    steps = []
    for sms in HOST_SM_COUNTS:
        for device in range(count):
            for engine in _engines(bulk, device):
                ways = [_mover(device, op, engine, "copy", sms, [HOST]) for op in ("push", "pull")]
                steps += [_rate("alone", [way], HOST_BYTES) for way in ways]
                steps.append(_rate("duplex", ways, HOST_BYTES))
        for engine in _engines(bulk, *range(count)):
            if count > 1:
                steps.append(_rate("all", [_mover(d, op, engine, "copy", sms, [HOST]) for d in range(count)
                                           for op in ("push", "pull")], HOST_BYTES))
    return steps


def _interference(count: int, bulk: Sequence[bool], linked: Sequence[tuple[int, int]]) -> list[Step]:
    """GEMMs on all GPUs beside movers on all GPUs; each moves to or from one peer, or host memory if it has none."""
    peers = {}
    for device in range(count):
        reach = [b if a == device else a for a, b in linked if device in (a, b)]
        peers[device] = min(reach, key=lambda p: (p - device) % count) if reach else HOST
    engine = _engines(bulk, *range(count))[-1]
    steps: list[Step] = [{"do": "gemm", "shape": list(GEMM), "movers": [], "devices": list(range(count))}]
    for op, sms in itertools.product(("push", "pull"), INTERFERENCE_SM_COUNTS):
        movers = [_mover(d, op, engine, "copy", sms, [peers[d]]) for d in range(count)]
        steps.append({"do": "gemm", "shape": list(GEMM), "movers": movers, "devices": list(range(count))})
    return steps


def pairs_of(step: Step) -> set[tuple[int, int]]:
    """The pairs of devices that a step uses, so that a pair that hung is left alone afterwards."""
    if step["do"] in ("verify", "signal", "atomics"):
        return {tuple(sorted((step["src"], step["dst"])))}  # type: ignore[arg-type]
    if step["do"] == "copy":
        return {tuple(sorted(job)) for job in step["jobs"]}  # type: ignore[misc]
    return {tuple(sorted((mover["device"], peer))) for mover in step["movers"]  # type: ignore[misc]
            for peer in mover["peers"]}
