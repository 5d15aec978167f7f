"""Small calls of every variant of the layer, for compute-sanitizer (docs/nvlink.md gives the command). Also runs alone.

    python -m tests.cuda.sanitize_cases [RANK WORLD STORE]   STORE: a file that all ranks name; left out: one rank
"""

from __future__ import annotations

import itertools
import os
import sys

import torch
import torch.distributed as dist

from tests.cuda.checks import BUDGET, Case, Data, Ranks

LIMIT_S = 100.0  # a checked kernel takes its time


def main() -> None:
    rank, world = (int(word) for word in (sys.argv[1:3] or ("0", "1")))
    torch.cuda.set_device(rank % torch.cuda.device_count())
    if world > 1:
        dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.FileStore(sys.argv[3], world), rank=rank, world_size=world)
    ranks, done = Ranks(rank, world, torch.device("cuda", torch.cuda.current_device())), 0
    for mode, row_block in itertools.product(("ep", "tp"), (64, 128)):
        case = Case(70, 2, 5, (70, 33), mode, row_block, 2, hidden=72, inter=40)
        layer, data = case.layer(ranks, timeout_s=LIMIT_S), Data(case, ranks)
        data.load(layer)
        for count in (case.count(rank), 0):
            args = data.mine(count)
            out = layer(*args)
            layer.synchronize()
            assert data.error(out, args) <= 2 * BUDGET, (case, count)
            done += 1
    torch.cuda.synchronize()
    print(f"rank {rank} of {world}: {done} calls right", flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
