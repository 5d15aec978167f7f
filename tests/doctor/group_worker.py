"""One rank of a process group on a recorded machine: what test_group.py starts in processes of their own."""

from __future__ import annotations

import dataclasses
import traceback
from pathlib import Path

import machines


def rank_main(rank: int, world: int, folder: str, machine_name: str, environs: list[dict[str, str]],
              device: list[int | None], how: dict, results) -> None:
    """Joins a gloo group, asks moe_tk.doctor, and puts (rank, "ok" | error class, what) into the queue."""
    try:
        import os

        import torch.distributed as dist

        import moe_tk
        from moe_tk import diagnose

        os.environ.pop("LOCAL_RANK", None)
        os.environ["MOE_TK_CACHE_DIR"] = f"{folder}/cache"
        machine = machines.load(machine_name)

        def read_machine(environ=None):
            mine = environs[rank]
            shown = mine if environ is None else {**mine, "CUDA_VISIBLE_DEVICES": environ["CUDA_VISIBLE_DEVICES"]}
            return machines.snapshot(machine, Path(folder) / f"rank{rank}", shown)

        diagnose.read_machine = read_machine
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
        group = dist.group.WORLD if world % 2 else None  # None means the default group
        report = moe_tk.doctor(group, device=device[rank], **how)
        results.put((rank, "ok", dataclasses.replace(report, seconds=None,
                                                     snapshot=dataclasses.replace(report.snapshot, taken_at=None))))
        dist.barrier()
    except Exception as error:
        results.put((rank, type(error).__name__, f"{error}" or traceback.format_exc()))
