"""A fake NVML with the interface of the real binding (module `pynvml`) that replays a recorded machine.

Like the real one it has constants, an NVMLError with `value`, a lazily loaded `nvmlLib`, struct types that are filled
in place, and some answers as bytes. A recorded machine is a dict (see machines.py); what it does not tell is not
supported.
"""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

CODES = {"InvalidArgument": 2, "NotSupported": 3, "NoPermission": 4, "NotFound": 6, "DriverNotLoaded": 9,
         "LibraryNotFound": 12, "FunctionNotFound": 13, "LibRmVersionMismatch": 18, "Unknown": 999}
TEXTS = {2: "Invalid Argument", 3: "Not Supported", 4: "Insufficient Permissions", 6: "Not Found",
         9: "Driver Not Loaded", 12: "NVML Shared Library Not Found", 13: "Function Not Found",
         18: "RM has detected an NVML/RM version mismatch.", 999: "Unknown Error"}
LEVELS = {"PIX": 10, "PXB": 20, "PHB": 30, "NODE": 40, "SYS": 50}
P2P = {"OK": 0, "CNS": 1, "GNS": 2, "TNS": 3, "DR": 4, "NS": 5, "U": 6}
P2P_KINDS = {0: "read", 1: "write", 2: "nvlink", 3: "atomics", 4: "pci"}


class NVMLError(Exception):
    """As in the real binding: `value` is the code, str() its text."""

    def __init__(self, value: int) -> None:
        super().__init__(value)
        self.value = value

    def __str__(self) -> str:
        return TEXTS.get(self.value, f"NVML Error with code {self.value}")


class c_nvmlGpuFabricInfo_v2_t(ctypes.Structure):
    _fields_ = [("version", ctypes.c_uint), ("clusterUuid", ctypes.c_uint8 * 16), ("status", ctypes.c_uint),
                ("cliqueId", ctypes.c_uint32), ("state", ctypes.c_uint8), ("healthMask", ctypes.c_uint32)]


class FakeNvml:
    """Stands for the module. machine: the recorded machine; missing: functions that this old binding lacks."""

    NVMLError = NVMLError
    # the real binding has these faults, so the fake has them too: a reader must not trust the constants
    NVML_P2P_CAPS_INDEX_READ = (0,)
    NVML_TOPOLOGY_SYSTEM = 50
    nvmlMemory_v2 = 0x2000028
    c_nvmlGpuFabricInfoV_t = c_nvmlGpuFabricInfo_v2_t

    def __init__(self, machine: dict[str, Any], missing: tuple[str, ...] = ()) -> None:
        self._machine = machine
        self._missing = {*missing, *machine.get("nvml", {}).get("missing", ())}
        self.nvmlLib: Any = None
        self._nvmlGetFunctionPointer_cache: dict[str, Any] = {"stale": object()}
        self.initialised = 0
        self.calls: list[str] = []
        for name in self._missing:
            if name in type(self).__dict__:
                setattr(self, name, _Absent())

    # --- what the real module does on its own
    def load_library(self, path: str) -> Any:
        """Stands for ctypes.CDLL(path)."""
        if path not in self._libraries():
            raise OSError(f"{path}: cannot open shared object file: No such file or directory")
        return SimpleNamespace(_name=path)

    def exists(self, path: str) -> bool:
        return path in self._libraries()

    def _libraries(self) -> dict[str, int | str]:
        return self._machine.get("nvml", {}).get("libraries", {"libnvidia-ml.so.1": 0})

    def nvmlInit(self) -> None:
        if self.nvmlLib is None:
            try:
                self.nvmlLib = self.load_library("libnvidia-ml.so.1")
            except OSError:
                raise NVMLError(CODES["LibraryNotFound"]) from None
        code = self._libraries()[self.nvmlLib._name]
        if code:
            raise NVMLError(CODES[code] if isinstance(code, str) else code)
        self.initialised += 1

    def nvmlShutdown(self) -> None:
        self.initialised -= 1

    # --- helpers
    def _check(self, name: str, gpu: dict[str, Any] | None = None) -> None:
        self.calls.append(name)
        if not self.initialised:
            raise NVMLError(1)
        for errors in (self._machine.get("nvml", {}).get("errors", {}), (gpu or {}).get("errors", {})):
            if name in errors:
                raise NVMLError(CODES[errors[name]])

    def _fact(self, name: str, gpu: dict[str, Any], key: str) -> Any:
        self._check(name, gpu)
        if key not in gpu:
            raise NVMLError(CODES["NotSupported"])
        return gpu[key]

    # --- system
    def nvmlSystemGetDriverVersion(self) -> bytes:
        self._check("nvmlSystemGetDriverVersion")
        return self._machine["driver"].encode()

    def nvmlSystemGetNVMLVersion(self) -> str:
        self._check("nvmlSystemGetNVMLVersion")
        return self._machine.get("nvml", {}).get("version", f"13.{self._machine['driver']}")

    # --- devices
    def nvmlDeviceGetCount(self) -> int:
        self._check("nvmlDeviceGetCount")
        return len(self._machine["gpus"])

    def nvmlDeviceGetHandleByIndex(self, index: int) -> dict[str, Any]:
        self._check("nvmlDeviceGetHandleByIndex")
        if not 0 <= index < len(self._machine["gpus"]):
            raise NVMLError(CODES["InvalidArgument"])
        return self._machine["gpus"][index]

    def nvmlDeviceGetUUID(self, gpu: dict[str, Any]) -> str:
        return self._fact("nvmlDeviceGetUUID", gpu, "uuid")

    def nvmlDeviceGetName(self, gpu: dict[str, Any]) -> bytes:
        return self._fact("nvmlDeviceGetName", gpu, "name").encode()

    def nvmlDeviceGetPciInfo(self, gpu: dict[str, Any]) -> Any:
        bus_id = self._fact("nvmlDeviceGetPciInfo", gpu, "pci")
        return SimpleNamespace(busId=f"0000{bus_id.upper()}".encode(), busIdLegacy=bus_id.encode())

    def nvmlDeviceGetCudaComputeCapability(self, gpu: dict[str, Any]) -> tuple[int, int]:
        arch = self._fact("nvmlDeviceGetCudaComputeCapability", gpu, "arch")
        return divmod(int(arch.removeprefix("sm_")), 10)

    def nvmlDeviceGetMemoryInfo(self, gpu: dict[str, Any], version: int | None = None) -> Any:
        total = self._fact("nvmlDeviceGetMemoryInfo", gpu, "memory_mib") << 20
        return SimpleNamespace(total=total, free=total, used=0)

    def nvmlDeviceGetEccMode(self, gpu: dict[str, Any]) -> list[int]:
        return [int(self._fact("nvmlDeviceGetEccMode", gpu, "ecc"))] * 2

    def nvmlDeviceGetCurrPcieLinkGeneration(self, gpu: dict[str, Any]) -> int:
        return self._fact("nvmlDeviceGetCurrPcieLinkGeneration", gpu, "pcie_gen")

    def nvmlDeviceGetMaxPcieLinkGeneration(self, gpu: dict[str, Any]) -> int:
        return self._fact("nvmlDeviceGetMaxPcieLinkGeneration", gpu, "pcie_gen_max")

    def nvmlDeviceGetCurrPcieLinkWidth(self, gpu: dict[str, Any]) -> int:
        return self._fact("nvmlDeviceGetCurrPcieLinkWidth", gpu, "pcie_width")

    def nvmlDeviceGetMaxPcieLinkWidth(self, gpu: dict[str, Any]) -> int:
        return self._fact("nvmlDeviceGetMaxPcieLinkWidth", gpu, "pcie_width_max")

    # --- MIG
    def nvmlDeviceGetMigMode(self, gpu: dict[str, Any]) -> list[int]:
        return [int(self._fact("nvmlDeviceGetMigMode", gpu, "mig"))] * 2

    def nvmlDeviceGetMaxMigDeviceCount(self, gpu: dict[str, Any]) -> int:
        self._check("nvmlDeviceGetMaxMigDeviceCount", gpu)
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, gpu: dict[str, Any], index: int) -> dict[str, Any]:
        self._check("nvmlDeviceGetMigDeviceHandleByIndex", gpu)
        slices = gpu.get("slices", [])
        if index >= len(slices):
            raise NVMLError(CODES["NotFound"])
        return slices[index]

    def nvmlDeviceGetAttributes(self, gpu: dict[str, Any]) -> Any:
        self._check("nvmlDeviceGetAttributes", gpu)
        return SimpleNamespace(multiprocessorCount=gpu["sm_count"], memorySizeMB=gpu["memory_mib"])

    # --- NVLink
    def _link(self, name: str, gpu: dict[str, Any], link: int) -> dict[str, Any]:
        self._check(name, gpu)
        links = gpu.get("links", [])
        if link >= len(links) or links[link] is None:  # a slot that is not wired
            raise NVMLError(CODES["NotSupported"])
        return links[link]

    def nvmlDeviceGetNvLinkState(self, gpu: dict[str, Any], link: int) -> int:
        return int(self._link("nvmlDeviceGetNvLinkState", gpu, link).get("up", True))

    def nvmlDeviceGetNvLinkVersion(self, gpu: dict[str, Any], link: int) -> int:
        return self._fact("nvmlDeviceGetNvLinkVersion", self._link("nvmlDeviceGetNvLinkVersion", gpu, link), "version")

    def nvmlDeviceGetNvLinkRemoteDeviceType(self, gpu: dict[str, Any], link: int) -> int:
        far = self._link("nvmlDeviceGetNvLinkRemoteDeviceType", gpu, link).get("far")
        return {"gpu": 0, "switch": 2}.get(far, 0xFF)

    def nvmlDeviceGetNvLinkRemotePciInfo(self, gpu: dict[str, Any], link: int) -> Any:
        bus_id = self._fact("nvmlDeviceGetNvLinkRemotePciInfo",
                            self._link("nvmlDeviceGetNvLinkRemotePciInfo", gpu, link), "to")
        return SimpleNamespace(busId=f"0000{bus_id.upper()}".encode())

    def nvmlDeviceGetGpuFabricInfoV(self, gpu: dict[str, Any], info: Any) -> int:
        fabric = self._fact("nvmlDeviceGetGpuFabricInfoV", gpu, "fabric")
        target = info._obj
        target.state = {"not-started": 1, "in-progress": 2, "completed": 3}[fabric["state"]]
        target.cliqueId = fabric.get("clique", 0)
        return 0

    # --- pairs
    def _pair(self, one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
        gpus = self._machine["gpus"]
        places = [next(i for i, gpu in enumerate(gpus) if gpu is end) for end in (one, other)]
        key = f"{min(places)}-{max(places)}"
        return {**self._machine.get("every_pair", {}), **self._machine.get("pairs", {}).get(key, {})}

    def nvmlDeviceGetTopologyCommonAncestor(self, one: dict[str, Any], other: dict[str, Any]) -> int:
        return LEVELS[self._fact("nvmlDeviceGetTopologyCommonAncestor", self._pair(one, other), "ancestor")]

    def nvmlDeviceGetP2PStatus(self, one: dict[str, Any], other: dict[str, Any], index: int) -> int:
        if not isinstance(index, int):
            raise TypeError("p2pIndex must be an int")
        return P2P[self._fact("nvmlDeviceGetP2PStatus", self._pair(one, other), P2P_KINDS[index])]


class _Absent:
    """A function that an old binding does not have: getattr finds nothing usable."""

    def __call__(self, *args: Any) -> Any:
        raise AttributeError("this version of the binding does not have it")
