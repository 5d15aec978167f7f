"""Facts from the CUDA driver API, printed as JSON. Run as a script in a child process: it needs no other file of ours.

No context is created: device attributes, UUIDs and peer access can be asked without one. The parent process that
starts this never initialises CUDA (NVML may map libcuda, which is harmless), so it can still fork.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import uuid

ATTRIBUTES = {  # CUdevice_attribute
    "sm_count": 16, "integrated": 18, "unified_addressing": 41, "major": 75, "minor": 76, "host_native_atomics": 86,
    "shared_per_block": 97, "multicast": 132,
}
P2P_NATIVE_ATOMICS = 3  # CUdevice_P2PAttribute
LIBRARIES = ("libcuda.so.1", "/usr/lib/wsl/lib/libcuda.so.1", "/usr/local/nvidia/lib64/libcuda.so.1")


def load_driver():
    errors = []
    for path in LIBRARIES:
        try:
            return ctypes.CDLL(path), path
        except OSError as error:
            errors.append(str(error))
    raise OSError("; ".join(errors))


class Driver:
    def __init__(self) -> None:
        self.lib, self.path = load_driver()

    def error(self, code: int) -> str:
        name = ctypes.c_char_p()
        try:
            self.lib.cuGetErrorName(code, ctypes.byref(name))
        except AttributeError:
            pass
        return (name.value or b"").decode() or f"CUDA error {code}"

    def number(self, function: str, *args):
        """The int that a call writes through its first argument, or None."""
        value = ctypes.c_int()
        try:
            code = getattr(self.lib, function)(ctypes.byref(value), *args)
        except AttributeError:
            return None
        return value.value if code == 0 else None


def device_facts(driver: Driver, index: int) -> dict:
    device = ctypes.c_int()
    code = driver.lib.cuDeviceGet(ctypes.byref(device), index)
    if code:
        return {"index": index, "error": driver.error(code)}
    facts: dict = {"index": index, "handle": device.value}
    raw = (ctypes.c_ubyte * 16)()
    for function in ("cuDeviceGetUuid_v2", "cuDeviceGetUuid"):  # the first one knows MIG slices
        if hasattr(driver.lib, function) and getattr(driver.lib, function)(ctypes.byref(raw), device) == 0:
            facts["uuid"] = str(uuid.UUID(bytes=bytes(raw)))
            break
    name = ctypes.create_string_buffer(256)
    if driver.lib.cuDeviceGetName(name, 256, device) == 0:
        facts["name"] = name.value.decode(errors="replace")
    pci = ctypes.create_string_buffer(64)
    if driver.lib.cuDeviceGetPCIBusId(pci, 64, device) == 0:
        facts["pci"] = pci.value.decode(errors="replace").lower()
    memory = ctypes.c_size_t()
    if driver.lib.cuDeviceTotalMem_v2(ctypes.byref(memory), device) == 0:
        facts["memory_bytes"] = memory.value
    for key, number in ATTRIBUTES.items():
        facts[key] = driver.number("cuDeviceGetAttribute", number, device)
    return facts


def peer_facts(driver: Driver, devices: list[dict]) -> list[dict]:
    found = []
    for one in devices:
        for other in devices:
            if one is other or "handle" not in one or "handle" not in other:
                continue
            found.append({
                "from": one["index"], "to": other["index"],
                "access": driver.number("cuDeviceCanAccessPeer", one["handle"], other["handle"]),
                "native_atomics": driver.number("cuDeviceGetP2PAttribute", P2P_NATIVE_ATOMICS, one["handle"],
                                                other["handle"]),
            })
    return found


def collect() -> dict:
    try:
        driver = Driver()
    except OSError as error:
        return {"state": "no-library", "error": str(error), "devices": [], "peers": []}
    result: dict = {"state": "ok", "library": driver.path, "devices": [], "peers": [],
                    "version": driver.number("cuDriverGetVersion")}
    code = driver.lib.cuInit(0)
    if code:
        # 100: no device is visible; all others are real failures
        result.update(state="no-device" if code == 100 else "failed", error=driver.error(code), code=code)
        return result
    count = driver.number("cuDeviceGetCount") or 0
    result["devices"] = [device_facts(driver, index) for index in range(count)]
    result["peers"] = peer_facts(driver, result["devices"])
    if not count:
        result["state"] = "no-device"
    return result


if __name__ == "__main__":
    print(json.dumps(collect()), flush=True)
    sys.stdout.flush()
    os._exit(0)  # a broken driver can hang in its exit handlers
