"""Runs a function of tests.cuda.checks, or of another module there, on every rank, one process and one GPU each.

    python -m tests.cuda.ranks tables,graphs 2 60          on 2 ranks, within 60 s; names of another module: checks_serial:tables
    python -m tests.cuda.ranks tables,graphs RANK WORLD PORT   what each rank runs

A check that fails is told, and the next one runs if all ranks have come to the end of this one.
"""

from __future__ import annotations

import importlib
import os
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def run_check(rank: int, world: int, names: str) -> None:
    """A job of the pools of tests/ranks.py, for ranks that stay up between tests: names as in run_ranks, the current device."""
    import torch

    from tests.cuda import checks

    ranks = checks.Ranks(rank, world, torch.device("cuda", torch.cuda.current_device()))
    for name in names.split(","):
        check_of(name)(ranks)


def check_of(name: str) -> Callable[[Any], None]:
    """The function that a name of run_ranks stands for."""
    module, _, function = name.rpartition(":")
    return getattr(importlib.import_module(f"tests.cuda.{module or 'checks'}"), function)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def run_ranks(names: str, *, world: int = 2, timeout_s: float = 120.0) -> tuple[str, bool]:
    """(output of all ranks, whether all checks have passed on all of them)."""
    port = free_port()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    processes = [subprocess.Popen([sys.executable, "-m", "tests.cuda.ranks", names, str(rank), str(world), str(port)], cwd=ROOT,
                                  env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
                 for rank in range(world)]
    deadline = time.monotonic() + timeout_s
    outputs = []
    for rank, process in enumerate(processes):
        try:
            text = process.communicate(timeout=max(0.1, deadline - time.monotonic()))[0]
        except subprocess.TimeoutExpired:
            process.kill()
            text = process.communicate()[0] + f"\nkilled after {timeout_s:g} s\n"
        outputs.append(f"--- rank {rank}: status {process.returncode}\n{text[-20000:]}")
    return "\n".join(outputs), not any(process.returncode for process in processes)


def rank_main(names: list[str], rank: int, world: int, port: int) -> None:
    """Ends the process, with status 1 if a check failed here."""
    import torch
    import torch.distributed as dist

    from tests.cuda import checks

    # The device is not the rank, so that nothing can take the one for the other.
    device = torch.device("cuda", (rank + 1) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("cpu:gloo,cuda:nccl", rank=rank, world_size=world)
    ranks, failed = checks.Ranks(rank, world, device), False
    for index, name in enumerate(names):
        begin, outcome = time.monotonic(), "passed"
        try:
            check_of(name)(ranks)
        except BaseException:  # pytest's own failures are no Exceptions
            outcome, failed = "FAILED", True
            traceback.print_exc()
        print(f"{name}: {outcome} in {time.monotonic() - begin:.1f} s", flush=True)
        if index + 1 < len(names):
            here = ranks.group.gather(name, timeout_s=20, step=f"test: the end of {name}")
            assert here == [name] * world, f"ranks are in different places after {name}: {here}"
    os._exit(failed)  # a peer may be gone: no collective tear-down


def main() -> None:
    checks, *numbers = sys.argv[1:]
    if len(numbers) == 3:
        rank_main(checks.split(","), *map(int, numbers))
    world, seconds = (*map(int, numbers), *(2, 120)[len(numbers):])
    text, passed = run_ranks(checks, world=world, timeout_s=seconds)
    print(text)
    sys.exit(0 if passed else 1)


if __name__ == "__main__":
    main()
