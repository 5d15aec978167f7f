"""What GPUs there are, how they are connected, and which protocol follows: facts, probes, one verdict.

The verdict is a pure function (`decide`); the doctor prints it and the layer obeys it. Nothing here imports torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moe_tk.topology.facts import (
        GpuFacts,
        HostFacts,
        PairFacts,
        TopologySnapshot,
        snapshot_from_json,
        snapshot_to_json,
    )
    from moe_tk.topology.probes import ProbeResults
    from moe_tk.topology.reader import take_snapshot
    from moe_tk.topology.report import Report, make_report
    from moe_tk.topology.verdict import PairVerdict, Verdict, decide, decide_cpu

_HOME = {
    "GpuFacts": "facts", "HostFacts": "facts", "PairFacts": "facts", "TopologySnapshot": "facts",
    "snapshot_from_json": "facts", "snapshot_to_json": "facts", "ProbeResults": "probes", "take_snapshot": "reader",
    "Report": "report", "make_report": "report", "PairVerdict": "verdict", "Verdict": "verdict", "decide": "verdict",
    "decide_cpu": "verdict",
}

__all__ = [
    "GpuFacts", "HostFacts", "PairFacts", "PairVerdict", "ProbeResults", "Report", "TopologySnapshot", "Verdict",
    "decide", "decide_cpu", "make_report", "snapshot_from_json", "snapshot_to_json", "take_snapshot",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'moe_tk.topology' has no attribute {name!r}")
    return getattr(importlib.import_module(f"moe_tk.topology.{_HOME[name]}"), name)
