"""The process that touches the GPUs: reads steps from stdin, runs them through the probe library, prints JSON lines.

Run as a script. It imports nothing of ours and may be killed at any moment: {"begin": i} tells what it is at.
"""

from __future__ import annotations

import ctypes
import json
import os
import statistics
import sys

ABI = 1
MAX_PEERS = 16
SECONDS, REPEATS, RATE_LIMIT_S = 0.004, 5, 5.0
GEMM_ROUNDS, GEMMS_PER_ROUND = 3, 10
PAYLOADS = {"copy": 0, "wire": 1, "parked": 2}


class MoverRequest(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int) for name in ("device", "push", "bulk", "payload", "blocks", "num_peers")] + [
        ("peers", ctypes.c_int * MAX_PEERS)]


class Library:
    def __init__(self, path: str) -> None:
        self.lib = ctypes.CDLL(path)
        self.lib.moe_tk_probe_last_error.restype = ctypes.c_char_p
        if self.lib.moe_tk_probe_abi() != ABI:
            raise RuntimeError(f"{path} has interface {self.lib.moe_tk_probe_abi()}, wanted {ABI}: build it again")

    def call(self, name: str, *args) -> None:
        if getattr(self.lib, f"moe_tk_probe_{name}")(*args):
            raise RuntimeError(self.lib.moe_tk_probe_last_error().decode(errors="replace"))


def say(**event) -> None:
    print(json.dumps(event), flush=True)


def requests(movers: list[dict], parked: bool = False):
    array = (MoverRequest * len(movers))()
    for request, mover in zip(array, movers, strict=True):
        request.device, request.push = mover["device"], mover["op"] == "push"
        request.bulk = mover["engine"] == "bulk"
        request.payload = PAYLOADS["parked" if parked else mover["payload"]]
        request.blocks, request.num_peers = mover["sms"], len(mover["peers"])
        for place, peer in enumerate(mover["peers"]):
            request.peers[place] = peer
    return array


def verify(library: Library, step: dict, limit_s: float) -> dict:
    out = (ctypes.c_uint64 * 6)()
    library.call("verify", step["src"], step["dst"], int(step["kind"] == "push"), int(step["engine"] == "bulk"),
                 ctypes.c_uint64(step["bytes"]), ctypes.c_double(limit_s), step.get("fault", 0), out)
    timed_out, bad, offset, seen, wanted, round_ = out
    if timed_out:
        return {"status": "timeout", "detail": f"the flag of round {round_} never arrived"}
    if bad:
        return {"status": "mismatch", "offset": offset, "seen": f"{seen:#018x}", "wanted": f"{wanted:#018x}",
                "bad_words": bad, "detail": f"{bad} of {step['bytes'] // 16} words wrong from byte {offset} on"}
    return {"status": "ok"}


def signal(library: Library, step: dict, limit_s: float) -> dict:
    us, timed_out = ctypes.c_double(), ctypes.c_int()
    library.call("signal", step["src"], step["dst"], step["rounds"], ctypes.c_double(limit_s), ctypes.byref(us),
                 ctypes.byref(timed_out))
    if timed_out.value:
        return {"status": "timeout", "detail": "a signal never arrived"}
    return {"status": "ok", "value": us.value}


def atomics(library: Library, step: dict, limit_s: float) -> dict:
    sources = (ctypes.c_int * len(step["sources"]))(*step["sources"])
    sent, counted = ctypes.c_uint64(), ctypes.c_uint64()
    library.call("atomics", step["dst"], sources, len(sources), step["increments"], ctypes.byref(sent),
                 ctypes.byref(counted))
    status = "ok" if sent.value == counted.value else "lost"
    return {"status": status, "sent": sent.value, "counted": counted.value}


def rate(library: Library, step: dict, limit_s: float) -> dict:
    gbs = (ctypes.c_double * len(step["movers"]))()
    library.call("rate", requests(step["movers"]), len(step["movers"]), ctypes.c_uint64(step["bytes"]),
                 ctypes.c_double(SECONDS), REPEATS, ctypes.c_double(RATE_LIMIT_S), gbs)
    return {"gbs": list(gbs)}


def copy(library: Library, step: dict, limit_s: float) -> dict:
    count = len(step["jobs"])
    sources = (ctypes.c_int * count)(*(job[0] for job in step["jobs"]))
    targets = (ctypes.c_int * count)(*(job[1] for job in step["jobs"]))
    gbs = (ctypes.c_double * count)()
    library.call("copy_engine", sources, targets, count, ctypes.c_uint64(step["bytes"]), ctypes.c_double(SECONDS * 4),
                 REPEATS, gbs)
    return {"gbs": list(gbs)}


class Gemms:
    """The same bf16 product on every device, timed by events: made once, since memory and warm-up cost time."""

    def __init__(self) -> None:
        self.operands: dict = {}

    def ready(self, devices: list[int], shape: list[int]) -> None:
        import torch

        m, n, k = shape
        for device in devices:
            if device in self.operands:
                continue
            where = torch.device("cuda", device)
            a = torch.randn(m, k, device=where, dtype=torch.bfloat16)
            b = torch.randn(k, n, device=where, dtype=torch.bfloat16)
            out = torch.empty(m, n, device=where, dtype=torch.bfloat16)
            for _ in range(3):
                torch.mm(a, b, out=out)
            torch.cuda.synchronize(where)
            self.operands[device] = (a, b, out)

    def time_us(self, devices: list[int]) -> list[list[float]]:
        import torch

        events = {}
        for device in devices:
            with torch.cuda.device(device):
                marks = [torch.cuda.Event(enable_timing=True) for _ in range(GEMMS_PER_ROUND + 1)]
                events[device] = marks
        for i in range(GEMMS_PER_ROUND + 1):
            for device in devices:
                with torch.cuda.device(device):
                    events[device][i].record()
                    if i < GEMMS_PER_ROUND:
                        a, b, out = self.operands[device]
                        torch.mm(a, b, out=out)
        result = []
        for device in devices:
            marks = events[device]
            marks[-1].synchronize()  # not the device: movers that run beside would be waited for until their limit
            result.append([1e3 * marks[i].elapsed_time(marks[i + 1]) for i in range(1, GEMMS_PER_ROUND)])
        return result


GEMMS = Gemms()


def gemm(library: Library, step: dict, limit_s: float) -> dict:
    devices, movers = step["devices"], step["movers"]
    GEMMS.ready(devices, step["shape"])
    times: dict[str, list[list[float]]] = {"parked": [[] for _ in devices], "moving": [[] for _ in devices]}
    gbs: list[list[float]] = [[] for _ in movers]
    for _ in range(GEMM_ROUNDS):
        for mode in ("parked", "moving"):
            if movers:
                library.call("traffic_start", requests(movers, mode == "parked"), len(movers),
                             ctypes.c_uint64(32 << 20), ctypes.c_double(RATE_LIMIT_S))
            samples = GEMMS.time_us(devices)
            if movers:
                reached = (ctypes.c_double * len(movers))()
                library.call("traffic_stop", reached)
                if mode == "moving":
                    for place, value in enumerate(reached):
                        gbs[place].append(value)
            for place, values in enumerate(samples):
                times[mode][place] += values
    return {"parked_us": [statistics.median(v) for v in times["parked"]],
            "gemm_us": [statistics.median(v) for v in times["moving"]],
            "gbs": [statistics.median(v) for v in gbs]}


def healthy(library: Library, devices: int) -> bool:
    try:
        for device in range(devices):
            library.call("warm", device)
    except RuntimeError:
        return False
    return True


ACTIONS = {"verify": verify, "signal": signal, "atomics": atomics, "rate": rate, "copy": copy, "gemm": gemm}


def main() -> None:
    plan = json.load(sys.stdin)
    library = Library(plan["library"])
    for device in range(plan["devices"]):
        library.call("warm", device)
    say(ready=True)
    for number, step in plan["steps"]:
        say(begin=number)
        try:
            say(end=number, result=ACTIONS[step["do"]](library, step, plan["limit_s"]))
        except Exception as error:
            say(end=number, error=f"{error}" or type(error).__name__)
            if not healthy(library, plan["devices"]):
                break  # the error poisoned a context: the parent goes on with a fresh process
    say(done=True)


if __name__ == "__main__":
    try:
        main()
    except Exception as error:
        say(fatal=f"{type(error).__name__}: {error}")
    sys.stdout.flush()
    os._exit(0)  # a hung driver must not keep us in exit handlers
