"""What the planner knows of a machine: four numbers of one of its GPUs."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Machine:
    """One GPU of the group. Rates are those that kernels reach, not those of a data sheet."""

    name: str
    sms: int           # multiprocessors: blocks of a persistent launch
    tflops: float      # of a bf16 GEMM
    hbm_gbs: float     # of its memory, in GB/s
    wire_gbs: float    # to the other GPUs together, one way, in GB/s
    origin: str = "measured"


H200 = Machine("H200", sms=132, tflops=795, hbm_gbs=4590, wire_gbs=364)  # two H200, NV18
KNOWN = (
    H200,
    replace(H200, name="GH200", hbm_gbs=4590 * 4.0 / 4.8, origin="as an H200 with 4.0 TB/s of HBM"),
    replace(H200, name="H100", hbm_gbs=4590 * 3.35 / 4.8, origin="as an H200 with 3.35 TB/s of HBM"),
)


def machine_of(gpu_name: str, sms: int) -> Machine:
    """The machine behind a GPU's name, with `sms` multiprocessors in use; an unknown one is taken for an H200."""
    known = next((machine for machine in sorted(KNOWN, key=lambda machine: -len(machine.name)) if machine.name in gpu_name), None)
    if known is None:
        known = replace(H200, name=gpu_name, origin="unknown, taken for an H200")
    return replace(known, sms=sms, tflops=known.tflops * sms / known.sms)
