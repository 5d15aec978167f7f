"""Which back end a run takes: the GPUs that the kernels run on, asked without CUDA in this process."""

from __future__ import annotations

import os
from dataclasses import dataclass

from moe_tk.topology.reader import query_cuda

CAPABILITY = (9, 0)  # of the GPUs that the CUDA back end runs on


@dataclass(frozen=True)
class Gpus:
    """CUDA's indices of GPUs that can work together: each one reaches the memory of all others."""

    indices: tuple[int, ...]
    why_none: str = ""

    @property
    def number(self) -> int:
        return len(self.indices)


def find_gpus() -> Gpus:
    """The GPUs of this machine that ranks may run on, and one sentence where there are none. Takes a tenth of a second."""
    answers = query_cuda(dict(os.environ))
    devices = [device for device in answers["devices"] if "error" not in device]
    fit = [device["index"] for device in devices if (device.get("major"), device.get("minor")) == CAPABILITY]
    if not devices:
        return Gpus((), answers.get("error") or "CUDA finds no GPU")
    if not fit:
        names = ", ".join(sorted({str(device.get("name", "unknown")) for device in devices}))
        return Gpus((), f"no GPU of compute capability {CAPABILITY[0]}.{CAPABILITY[1]} (Hopper) among {names}")
    reached = {(peer["from"], peer["to"]) for peer in answers["peers"] if peer["access"] == 1}
    chosen = [fit[0]]
    for index in fit[1:]:
        if all((index, other) in reached and (other, index) in reached for other in chosen):
            chosen.append(index)
    return Gpus(tuple(chosen))


def cuda_patterns() -> tuple[str, ...]:
    """Patterns of the layer on GPUs, as the layer itself says. Loads torch."""
    from moe_tk.cuda_layer import PATTERNS

    return tuple(name for name in ("serial", "two_kernel", "mega") if name in PATTERNS)
