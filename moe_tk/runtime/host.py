"""The native module of the CPU back end: built on first use, loaded once per process."""

from __future__ import annotations

from types import ModuleType

import torch

from moe_tk.builder.build import build_host_module, load_module
from moe_tk.config import env
from moe_tk.errors import BuildError
from moe_tk.memory.layout import CONTROL_BYTES, HEADER_BYTES

NAME = "moe_tk_host"
SOURCES = ("tk_kernels/bindings/host_module.cpp",)
FAULT_POINT_FLAGS = ("-DMOE_TK_FAULT_POINTS",)
_module: ModuleType | None = None


def host_module() -> ModuleType:
    """The module; raises BuildError when it can be neither found in the cache nor built. With MOE_TK_FAULT_POINTS it is the
    variant of the tests, which has arm_fault(); the choice is made once per process."""
    global _module
    if _module is None:
        flags = FAULT_POINT_FLAGS if env("MOE_TK_FAULT_POINTS") else ()
        module = load_module(build_host_module(NAME, SOURCES, extra_flags=flags), NAME)
        if (module.CONTROL_BYTES, module.HEADER_BYTES) != (CONTROL_BYTES, HEADER_BYTES):
            raise BuildError(f"{module.__file__} has control blocks of {module.CONTROL_BYTES} and headers of {module.HEADER_BYTES} "
                             f"bytes, this package expects {CONTROL_BYTES} and {HEADER_BYTES}: clear the module cache")
        _module = module
    return _module


def dtype_code(dtype: torch.dtype) -> int:
    """The module's number for an element type."""
    module = host_module()
    return {torch.float32: module.FLOAT32, torch.bfloat16: module.BFLOAT16}[dtype]
