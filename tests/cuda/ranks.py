"""Runs a function of tests.cuda.checks on every rank, one process and one GPU each, and reports what failed.

    run_ranks("tables,graphs", world=2, timeout_s=60)  from a test; names of another module: "checks_serial:tables"
    python -m tests.cuda.ranks CHECK RANK WORLD PORT  in each process
"""

from __future__ import annotations

import importlib
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def run_check(rank: int, world: int, names: str) -> None:
    """A job of the pools of tests/ranks.py, for ranks that stay up between tests: names as in run_ranks, the current device."""
    import torch

    from tests.cuda import checks

    ranks = checks.Ranks(rank, world, torch.device("cuda", torch.cuda.current_device()))
    for name in names.split(","):
        module, _, function = name.rpartition(":")
        getattr(importlib.import_module(f"tests.cuda.{module or 'checks'}"), function)(ranks)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def run_ranks(check: str, *, world: int = 2, timeout_s: float = 120.0, killed: tuple[int, ...] = ()) -> str:
    """Output of all ranks. Fails when a rank does not end with status 0 in time; ranks in `killed` must die by a signal."""
    port = free_port()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    processes = [subprocess.Popen([sys.executable, "-m", "tests.cuda.ranks", check, str(rank), str(world), str(port)], cwd=ROOT,
                                  env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
                 for rank in range(world)]
    deadline = time.monotonic() + timeout_s
    outputs = []
    for process in processes:
        try:
            outputs.append(process.communicate(timeout=max(0.1, deadline - time.monotonic()))[0])
        except subprocess.TimeoutExpired:
            process.kill()
            outputs.append(process.communicate()[0] + f"\nkilled after {timeout_s:g} s")
    ended = list(enumerate(zip(processes, outputs, strict=True)))
    text = "\n".join(f"--- rank {rank}: status {process.returncode}\n{out[-4000:]}" for rank, (process, out) in ended)
    for rank, (process, _) in ended:
        good = process.returncode < 0 if rank in killed else process.returncode == 0
        assert good, text
    return text


def main() -> None:
    check, rank, world, port = sys.argv[1], *map(int, sys.argv[2:5])
    import torch
    import torch.distributed as dist

    from tests.cuda import checks

    # The device is not the rank, so that nothing can take the one for the other.
    device = torch.device("cuda", (rank + 1) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("cpu:gloo,cuda:nccl", rank=rank, world_size=world)
    for name in check.split(","):
        begin = time.monotonic()
        home, _, function = name.rpartition(":")
        module = importlib.import_module(f"tests.cuda.{home or 'checks'}")
        getattr(module, function)(checks.Ranks(rank, world, device))
        print(f"{name}: passed in {time.monotonic() - begin:.1f} s", flush=True)
    os._exit(0)  # a peer may be gone: no collective tear-down


if __name__ == "__main__":
    main()
