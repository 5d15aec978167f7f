"""moe_tk: Mixture-of-Experts layers whose communication runs inside the GEMM kernels.

Importing this package loads neither torch nor a compiler, a GPU or NVML: names are resolved on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from moe_tk.errors import (
    ArgumentError,
    ArgumentTypeError,
    BuildError,
    CapacityError,
    MoETkError,
    PeerLost,
    PeerRefused,
    ProtocolTimeout,
    ScheduleError,
    TopologyError,
)

if TYPE_CHECKING:
    from moe_tk import ops, reference, schedule
    from moe_tk.diagnose import doctor
    from moe_tk.layer import MoELayer
    from moe_tk.memory import estimate_memory

__version__ = "0.1.0"

_LAZY = {
    "MoELayer": ("moe_tk.layer", "MoELayer"),
    "doctor": ("moe_tk.diagnose", "doctor"),
    "estimate_memory": ("moe_tk.memory", "estimate_memory"),
    "ops": ("moe_tk.ops", None),
    "reference": ("moe_tk.reference", None),
    "schedule": ("moe_tk.schedule", None),
}

__all__ = [
    "ArgumentError", "ArgumentTypeError", "BuildError", "CapacityError", "MoETkError", "MoELayer", "PeerLost",
    "PeerRefused", "ProtocolTimeout", "ScheduleError", "TopologyError", "doctor", "estimate_memory", "ops", "reference",
    "schedule",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'moe_tk' has no attribute {name!r}")
    module_name, attribute = _LAZY[name]
    module = importlib.import_module(module_name)
    value = module if attribute is None else getattr(module, attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(_LAZY))
