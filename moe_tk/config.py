"""The environment variables of moe_tk: read here and nowhere else, listed in one table."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from moe_tk.errors import ArgumentError


def _positive_float(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise ValueError
    return value


def _positive_int(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError
    return value


def _flag(text: str) -> bool:
    return {"1": True, "true": True, "yes": True, "on": True,
            "0": False, "false": False, "no": False, "off": False}[text.lower()]


@dataclass(frozen=True, slots=True)
class EnvVar:
    """One variable: how it is parsed, what it means, what holds when it is unset."""

    name: str
    parse: Callable[[str], Any]
    default: Any
    valid: str  # shown in the error
    meaning: str


ENV_VARS = (
    EnvVar("MOE_TK_TIMEOUT_S", _positive_float, 10.0, "seconds > 0",
           "limit of every wait in a kernel, in seconds of wall clock"),
    EnvVar("MOE_TK_FIRST_CALL_TIMEOUT_S", _positive_float, 120.0, "seconds > 0",
           "limit of the waits while a layer is set up, where ranks may still be compiling"),
    EnvVar("MOE_TK_CACHE_DIR", str, None, "a folder",
           "where built modules and verdicts are kept (default: XDG cache, then home, then temp)"),
    EnvVar("MOE_TK_RECORD_DIR", str, None, "a folder",
           "where the wait record of a failed call is written (default: the temporary folder)"),
    EnvVar("MOE_TK_PROTOCOL", str, None, "nvlink | pcie | staged | shm",
           "overrides the protocol that the topology verdict would choose"),
    EnvVar("MOE_TK_BUILD_JOBS", _positive_int, None, "an integer >= 1",
           "compiler processes at a time (default: min(cores, free memory / 2 GiB); MAX_JOBS is honoured too)"),
    EnvVar("MOE_TK_BUILD_TIMEOUT_S", _positive_float, 900.0, "seconds > 0",
           "how long to wait for another process that builds the same module"),
    EnvVar("MOE_TK_ALLOW_CUDA_MISMATCH", _flag, False, "0 | 1",
           "use an nvcc whose major version differs from torch's CUDA (an error otherwise)"),
    EnvVar("MOE_TK_TORCH_SPEC", str, "torch>=2.9", "a pip requirement",
           "which torch scripts/demo and scripts/test install (read by them, not by the package)"),
    EnvVar("CXX", str, None, "a C++20 compiler, with arguments if needed",
           "host compiler; must work when set (default: g++, then clang++, then c++ on PATH)"),
    EnvVar("CUDA_HOME", str, None, "a folder with bin/nvcc",
           "CUDA toolkit that is tried first; an error when it is not such a folder"),
    EnvVar("TORCH_CUDA_ARCH_LIST", str, None, "for example 9.0a;12.0a",
           "GPU architectures to build for where none is named and no GPU is seen"),
    EnvVar("MAX_JOBS", _positive_int, None, "an integer >= 1",
           "upper bound of the compiler processes at a time, as torch knows it"),
    EnvVar("XDG_CACHE_HOME", str, None, "an absolute folder",
           "second place that is tried for built modules, as XDG_CACHE_HOME/moe_tk"),
    EnvVar("MOE_TK_FAULT_POINTS", _flag, False, "0 | 1",
           "use a host module in which tests can make a rank die, stop or lag at a chosen item"),
    EnvVar("MOE_TK_COMMIT", str, None, "a git commit",
           "what benchmarks write down as their commit, for a copy of the package without its git checkout"),
    EnvVar("MOE_TK_TRACE", _flag, False, "0 | 1",
           "layers on GPUs use kernels that record what they do, for moe_tk.trace (slower, and another build)"),
    EnvVar("MOE_TK_VALIDATE", _flag, False, "0 | 1",
           "check every call's ids and tables on the host (slower; raises with rank, token, slot, value)"),
)
_BY_NAME = {var.name: var for var in ENV_VARS}


def env(name: str) -> Any:
    """The parsed value of a variable of ENV_VARS, or its default when unset or empty.

    Raises ArgumentError naming the variable, its value and the valid ones.
    """
    var = _BY_NAME[name]
    text = os.environ.get(name, "").strip()
    if not text:
        return var.default
    try:
        return var.parse(text)
    except (ValueError, KeyError):
        raise ArgumentError(f"environment variable {name}={text!r} is not valid: wanted {var.valid}") from None


def environment() -> Mapping[str, str]:
    """All variables as they are, for facts about other software (CUDA_VISIBLE_DEVICES, container hints) and children."""
    return os.environ
