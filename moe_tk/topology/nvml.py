"""NVML through the maintained binding (nvidia-ml-py), imported when first used: which library, and single queries.

The binding has one fault that matters here: some of its P2P index constants are tuples, so the numbers are ours.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

# "" is whatever the system's loader finds. The others are where containers and WSL keep the usable one.
LIBRARIES = ("", "/usr/lib/wsl/lib/libnvidia-ml.so.1", "/usr/local/nvidia/lib64/libnvidia-ml.so.1",
             "/usr/local/nvidia/lib/libnvidia-ml.so.1", "/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1",
             "/usr/lib/aarch64-linux-gnu/libnvidia-ml.so.1", "/usr/lib64/libnvidia-ml.so.1")

DRIVER_NOT_LOADED, LIBRARY_NOT_FOUND, FUNCTION_NOT_FOUND, VERSION_MISMATCH = 9, 12, 13, 18
INVALID_ARGUMENT, NOT_SUPPORTED = 2, 3
P2P_READ, P2P_WRITE, P2P_NVLINK, P2P_ATOMICS, P2P_PCI = range(5)
P2P_STATUS = {0: "ok", 1: "chipset-not-supported", 2: "gpu-not-supported", 3: "topology-not-supported",
              4: "disabled-by-regkey", 5: "not-supported"}
ANCESTOR = {0: "PIX", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}
FABRIC_STATE = {0: "none", 1: "not-started", 2: "in-progress", 3: "completed"}
REMOTE_GPU, REMOTE_SWITCH = 0, 2

_STATE_OF_ERROR = {LIBRARY_NOT_FOUND: "nvml-library-missing", DRIVER_NOT_LOADED: "nvml-driver-not-loaded",
                   VERSION_MISMATCH: "nvml-version-mismatch"}


def _load_binding() -> ModuleType:
    with warnings.catch_warnings():  # the deprecated package of the same module name warns at import
        warnings.simplefilter("ignore")
        return importlib.import_module("pynvml")


def _load_library(path: str) -> Any:
    return ctypes.CDLL(path)


@dataclass(frozen=True, slots=True)
class Failure:
    """A query that failed: NVML's error code, or None when the binding lacks the function."""

    call: str
    code: int | None
    text: str

    def __str__(self) -> str:
        return f"{self.call}: {self.text}"


@dataclass(slots=True)
class Nvml:
    """NVML as far as it could be opened. `state` is "ok" or the id of the finding that says why not."""

    binding: Any = None
    state: str = "nvml-binding-missing"
    error: str = ""
    library: str | None = None
    tried: list[str] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)

    @property
    def usable(self) -> bool:
        return self.state == "ok"

    def ask(self, name: str, *args: Any, about: str = "") -> Any:
        """The answer to one query, or None; the failure is kept in `failures`, which ends no report."""
        value, failure = self.try_ask(name, *args, about=about)
        if failure is not None:
            self.failures.append(failure)
        return value

    def try_ask(self, name: str, *args: Any, about: str = "") -> tuple[Any, Failure | None]:
        """As ask(), but the failure goes to the caller, who knows whether it means something."""
        call = f"{name}({about})"
        function = getattr(self.binding, name, None)
        if function is None:
            return None, Failure(call, None, "the binding does not have it")
        try:
            return function(*args), None
        except self.binding.NVMLError as error:
            return None, Failure(call, getattr(error, "value", None), str(error))
        except (AttributeError, TypeError, ValueError, OSError) as error:
            return None, Failure(call, None, f"{type(error).__name__}: {error}")

    def close(self) -> None:
        if self.usable:
            self.try_ask("nvmlShutdown")


def open_nvml(load_binding: Callable[[], Any] = _load_binding, load_library: Callable[[str], Any] = _load_library,
              exists: Callable[[str], bool] = os.path.exists) -> Nvml:
    """Try the libraries in turn until one initialises. Never raises; `state` and `error` say what went wrong.

    A library that is absent or answers "driver not loaded" (a generic one under WSL does) lets the next one try; a
    version mismatch or any other error ends the search, since another copy would answer the same.
    """
    nvml = Nvml()
    try:
        nvml.binding = load_binding()
    except Exception as error:  # an old or broken binding can fail in any way while it is imported
        nvml.error = f"{type(error).__name__}: {error}"
        return nvml
    worst: tuple[str, str] | None = None
    for path in LIBRARIES:
        if path and not exists(path):
            continue
        state, error = _initialise(nvml.binding, path, load_library)
        nvml.tried.append(path or "default")
        if state == "ok":
            nvml.state, nvml.error = "ok", ""
            nvml.library = getattr(nvml.binding.nvmlLib, "_name", None) or path or None
            return nvml
        if worst is None or worst[0] == "nvml-library-missing":
            worst = (state, error)
        if state not in ("nvml-library-missing", "nvml-driver-not-loaded"):
            break
    nvml.state, nvml.error = worst or ("nvml-library-missing", "")
    return nvml


def _initialise(binding: Any, path: str, load_library: Callable[[str], Any]) -> tuple[str, str]:
    if path:
        try:
            binding.nvmlLib = load_library(path)
        except OSError as error:
            return "nvml-library-missing", str(error)
        getattr(binding, "_nvmlGetFunctionPointer_cache", {}).clear()  # it still points into the library before
    try:
        binding.nvmlInit()
    except binding.NVMLError as error:
        return _STATE_OF_ERROR.get(getattr(error, "value", -1), "nvml-failed"), str(error)
    except (OSError, AttributeError) as error:
        return "nvml-library-missing", str(error)
    return "ok", ""


def text(value: Any) -> str | None:
    """Strings of the binding are str or bytes, depending on its version."""
    if value is None:
        return None
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def normal_pci(bus_id: Any) -> str | None:
    """ "00000000:17:00.0" (NVML) and "0000:17:00.0" (CUDA, sysfs) as the latter."""
    written = text(bus_id)
    if not written:
        return None
    domain, _, rest = written.strip().lower().partition(":")
    try:
        return f"{int(domain, 16):04x}:{rest}"
    except ValueError:
        return None
