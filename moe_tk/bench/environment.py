"""Where a run took place, for its JSON: GPUs and driver through NVML, versions, commit, date, command."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

from moe_tk.config import env
from moe_tk.demo import environment as host


def environment() -> dict[str, Any]:
    """Everything that a reader needs to repeat a run; what cannot be read is "unknown"."""
    import torch

    return {**host.environment(), "commit": commit(), "cuda": torch.version.cuda or "none", "nccl": _nccl(),
            "triton": host._version("triton"), **nvml_facts()}


def commit() -> str:
    """MOE_TK_COMMIT if set, for copies without git; else of the checkout that this package is in, with "+" when files differ."""
    if env("MOE_TK_COMMIT"):
        return env("MOE_TK_COMMIT")
    folder = str(Path(__file__).parent)
    head = output_of("git", "-C", folder, "rev-parse", "HEAD")
    changed = output_of("git", "-C", folder, "status", "--porcelain", "--untracked-files=no")
    return f"{head}{'+' if changed else ''}" if head else "unknown"


def _nccl() -> str:
    import torch

    if not torch.cuda.is_available():
        return "none"
    return ".".join(map(str, torch.cuda.nccl.version()))


def output_of(*command: str) -> str:
    """What a command prints; nothing where it is missing or fails."""
    if shutil.which(command[0]) is None:
        return ""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
    except subprocess.TimeoutExpired:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def nvml_facts() -> dict[str, Any]:
    """Driver, and name, memory and power limit of each GPU."""
    try:
        import pynvml

        pynvml.nvmlInit()
        driver, gpus = pynvml.nvmlSystemGetDriverVersion(), []
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            gpus.append({"name": _text(pynvml.nvmlDeviceGetName(handle)),
                         "memory_mib": pynvml.nvmlDeviceGetMemoryInfo(handle).total >> 20,
                         "power_limit_w": round(pynvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1000)})
        return {"driver": _text(driver), "gpus": gpus}
    except Exception as error:  # no binding, no library, no driver: other facts stay
        return {"driver": "unknown", "gpus": [], "nvml": f"{type(error).__name__}: {error}"}


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def gpu_state(device: Any) -> dict[str, Any]:
    """Clock and power of this rank's GPU now, and whether power holds it back; {} where that cannot be read."""
    if device.type != "cuda":
        return {}
    try:
        import pynvml
        import torch

        pynvml.nvmlInit()
        uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
        handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        reasons = pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
        return {"clock_mhz": pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM),
                "power_w": round(pynvml.nvmlDeviceGetPowerUsage(handle) / 1000),
                "power_limited": bool(reasons & pynvml.nvmlClocksThrottleReasonSwPowerCap)}
    except Exception:
        return {}
