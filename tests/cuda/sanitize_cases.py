"""Small calls of every variant of the layer and of every op, for compute-sanitizer (docs/testing.md gives the command). Runs
alone as well.

    python -m tests.cuda.sanitize_cases [RANK WORLD STORE]   STORE: a file that all ranks name; left out: one rank
"""

from __future__ import annotations

import itertools
import os
import sys

import torch
import torch.distributed as dist

from moe_tk import ops
from moe_tk.ops.gemm_weights import quantise_rows
from moe_tk.planner import FUSED_VARIANTS
from tests.cuda.checks import BUDGET, Case, Data, Ranks
from tests.cuda.checks_fp8 import ScaledData, fp8_layer
from tests.cuda.checks_ops import Dense, Routed

LIMIT_S = 100.0  # a checked kernel takes its time


def check_ops(ranks: Ranks) -> int:
    """Calls each op with row blocks of 64 and of 128; the number of calls."""
    os.environ["MOE_TK_TIMEOUT_S"] = str(LIMIT_S)
    for tokens in (33, 150):
        dense = Dense(ranks, tokens, 72, 264)
        dense.check(dense.gather(), dense.scatter(), tokens)
        for mode in ("ep", "tp"):
            case = Case(tokens, 2, 3, (tokens, 9), mode, hidden=72, inter=48)
            call = Routed(ranks, Data(case, ranks), case, True)
            call.check_dispatch(*call.dispatch())
            call.combine(call.dispatch()[0])
            call.mega()
    ops.synchronize()
    return 20


def check_fp8(ranks: Ranks) -> int:
    """Calls of the e4m3 layer, both row blocks, rows quantised by the kernel and given; the number of calls."""
    done = 0
    for mode, row_block in itertools.product(("ep", "tp"), (64, 128)):
        case = Case(70, 2, 5, (70, 33), mode, row_block, 2, hidden=256, inter=128 * ranks.world)
        layer, data = fp8_layer(case, ranks, timeout_s=LIMIT_S), ScaledData(case, ranks)
        data.load(layer)
        args = data.mine(case.count(ranks.rank))
        rows, scales = quantise_rows(args[0])
        for variant in FUSED_VARIANTS["float8_e4m3fn"]:
            if variant.row_block != row_block:
                continue
            layer._calls.variant = variant.name
            for out in (layer(*args), layer(rows, *args[1:], hidden_scales=scales.t())):
                layer.synchronize()
                data.check(layer, out, args, f"{case} {variant.name}")
                done += 1
    return done


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
        names = [variant.name for variant in FUSED_VARIANTS["bfloat16"] if variant.row_block == row_block]
        for name, count in itertools.product(names, (case.count(rank), 0)):
            layer._calls.variant, args = name, data.mine(count)
            out = layer(*args)
            layer.synchronize()
            assert data.error(out, args) <= 2 * BUDGET, (case, name, count)
            done += 1
    done += check_ops(ranks) + check_fp8(ranks)
    torch.cuda.synchronize()
    print(f"rank {rank} of {world}: {done} calls right", flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
