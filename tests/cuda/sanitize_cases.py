"""Small calls of every kernel of the layer and of the ops, for compute-sanitizer (docs/testing.md). Runs alone as well.

    python -m tests.cuda.sanitize_cases [--small] [--seconds S] [RANK WORLD STORE]

STORE: a file that all ranks name; without the three: one rank. --small: every role once, on few multiprocessors, for tools that
watch each access to shared memory. --seconds: after S seconds no further case begins, so that the tool still sums up.

The last line of each rank says how many calls were right: "rank 0 of 1: all 90 calls right".
"""

from __future__ import annotations

import argparse
import itertools
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist

from moe_tk import ops
from moe_tk.planner import FUSED_VARIANTS
from moe_tk.weights.gemm import quantise_rows
from tests.cuda.checks import BUDGET, Case, Data, Ranks
from tests.cuda.checks_dense_fp8 import ScaledDense
from tests.cuda.checks_fp8 import ScaledData, fp8_layer
from tests.cuda.checks_ops import Dense, Routed
from tests.cuda.checks_ops_fp8 import ScaledRouted

LIMIT_S = 100.0  # a checked kernel takes its time
FEW_SMS = 16     # the least that a launch of the layer takes
VARIANTS = tuple(itertools.product(("ep", "tp"), (64, 128)))
PLAIN = Case(70, 2, 5, (70, 33), segments=2, hidden=72, inter=40)
# Six blocks of K in both GEMMs and, with one mover, more rows than pieces in its ring: every ring in shared memory comes round.
ROUND = Case(40, 2, 3, (40, 9), segments=1, hidden=328, inter=328)
ROUND_FP8 = replace(ROUND, hidden=768, inter=768)

Cases = Iterator[tuple[str, Callable[[], int]]]  # what it is; makes calls, asserts, returns how many


def on_few_sms(ranks: Ranks) -> dict[str, int]:
    """Options of a layer that launches as few blocks as it can."""
    return {"reserve_sms": torch.cuda.get_device_properties(ranks.device).multi_processor_count - FEW_SMS}


def of_rank(case: Case, ranks: Ranks) -> Case:
    """The case with as many columns for each rank in TP as on one."""
    return replace(case, inter=case.inter * ranks.world) if case.mode == "tp" else case


def call_layer(ranks: Ranks, case: Case, counts: tuple[int, ...], pattern: str = "two_kernel", options: dict | None = None,
               **settings: int | str) -> int:
    """A bfloat16 call with each of these numbers of tokens; settings: of the layer's calls."""
    layer, data = case.layer(ranks, timeout_s=LIMIT_S, pattern=pattern, **(options or {})), Data(case, ranks)
    data.load(layer)
    for name, value in settings.items():
        setattr(layer._calls, name, value)
    for count in counts:
        args = data.mine(count)
        out = layer(*args)
        layer.synchronize()
        assert data.error(out, args) <= 2 * BUDGET, (case, count)
    return len(counts)


def call_fp8(ranks: Ranks, case: Case, given: tuple[bool, ...], options: dict | None = None, **settings: int | str) -> int:
    """e4m3 calls with rows that come with their scales, or that the kernel quantises."""
    layer, data = fp8_layer(case, ranks, timeout_s=LIMIT_S, **(options or {})), ScaledData(case, ranks)
    data.load(layer)
    for name, value in settings.items():
        setattr(layer._calls, name, value)
    args = data.mine(case.count(ranks.rank))
    rows, scales = quantise_rows(args[0])
    for quantised in given:
        out = layer(rows, *args[1:], hidden_scales=scales.t()) if quantised else layer(*args)
        layer.synchronize()
        data.check(layer, out, args, str(case))
    return len(given)


def call_dense(ranks: Ranks, tokens: int, depth: int) -> int:
    dense = Dense(ranks, tokens, depth, 264)
    dense.check(dense.gather(), dense.scatter(), tokens)
    return 2


def call_dense_fp8(ranks: Ranks, tokens: int, depth: int) -> int:
    dense = ScaledDense(ranks, tokens, depth, 264)
    dense.check(dense.gather(), dense.scatter(), tokens)
    return 2


def call_routed(ranks: Ranks, case: Case) -> int:
    call = Routed(ranks, Data(case, ranks), case, True)
    dispatched = call.dispatch()
    call.check_dispatch(*dispatched)
    call.combine(dispatched[0])
    call.mega()
    ops.synchronize()
    return 3


def call_routed_fp8(ranks: Ranks, case: Case, given: bool) -> int:
    call = ScaledRouted(ranks, ScaledData(case, ranks), case, True, given)
    results = call.all()
    ops.synchronize()
    call.check_dispatch(*results[:4])
    for name, out in zip(("gemm_combine", "mega_moe"), results[4:], strict=True):
        call.check_out(name, out)
    return 3


def small_cases(ranks: Ranks) -> Cases:
    few = on_few_sms(ranks)
    for mode, row_block in (("ep", 64), ("tp", 128)):
        case, scaled = (of_rank(replace(size, mode=mode, row_block=row_block), ranks) for size in (ROUND, ROUND_FP8))
        call, counts, what = partial(call_layer, ranks, case, options=few), (case.count(ranks.rank),), f"{mode} {row_block}"
        yield f"fused {what}", partial(call, counts)
        yield f"e4m3 {what}", partial(call_fp8, ranks, scaled, (row_block == 64,), few)
        yield f"serial {what}", partial(call, counts, "serial")
        yield f"serial e4m3 {what}", partial(call_fp8, ranks, scaled, (row_block == 64,), {**few, "pattern": "serial"})
        yield f"two passes {what}", partial(call, counts, passes=2)
    for tokens in (33, 150):  # row blocks of 64 and of 128
        yield f"dense ops {tokens}", partial(call_dense, ranks, tokens, 392)
        yield f"dense ops in e4m3 {tokens}", partial(call_dense_fp8, ranks, tokens, 768)
    yield "routed ops", partial(call_routed, ranks, replace(ROUND, row_block=None, segments=None))
    yield "routed ops in e4m3", partial(call_routed_fp8, ranks, replace(ROUND_FP8, row_block=None, segments=None), False)


def more_cases(ranks: Ranks) -> Cases:
    few = on_few_sms(ranks)
    for variant in FUSED_VARIANTS["bfloat16"]:
        call = partial(call_layer, ranks, replace(ROUND, hidden=648, inter=648), (ROUND.count(ranks.rank),), options=few)
        yield f"fused tiles {variant.name}", partial(call, variant=variant.name)
    for variant in FUSED_VARIANTS["float8_e4m3fn"]:
        call = partial(call_fp8, ranks, replace(ROUND, hidden=1152, inter=1152), (False,), few)
        yield f"e4m3 tiles {variant.name}", partial(call, variant=variant.name)
    for mode, row_block in VARIANTS:
        case, counts = replace(PLAIN, mode=mode, row_block=row_block), (PLAIN.count(ranks.rank), 0)
        yield f"fused {mode} {row_block}, two segments", partial(call_layer, ranks, case, counts)
        yield f"serial {mode} {row_block}, two segments", partial(call_layer, ranks, case, counts, "serial")
        scaled = replace(case, hidden=256, inter=128 * ranks.world)
        call = partial(call_fp8, ranks, scaled, (False, True))
        yield f"e4m3 {mode} {row_block}, two segments", call
        yield f"serial e4m3 {mode} {row_block}, two segments", partial(call, {"pattern": "serial"})
    for tokens in (33, 150):
        yield f"dense ops {tokens}, short", partial(call_dense, ranks, tokens, 72)
        for mode in ("ep", "tp"):
            case = Case(tokens, 2, 3, (tokens, 9), mode, hidden=72, inter=48)
            yield f"routed ops {mode} {tokens}", partial(call_routed, ranks, case)
            scaled = replace(case, hidden=256, inter=128 * ranks.world)
            yield f"routed ops in e4m3 {mode} {tokens}", partial(call_routed_fp8, ranks, scaled, True)


def ranks_of(place: list[str]) -> Ranks:
    """This process as one of the ranks that RANK WORLD STORE says, or alone."""
    rank, world = (int(word) for word in (place[:2] or ("0", "1")))
    torch.cuda.set_device(rank % torch.cuda.device_count())
    if world > 1:
        dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.FileStore(place[2], world), rank=rank, world_size=world)
    return Ranks(rank, world, torch.device("cuda", torch.cuda.current_device()))


def main() -> None:
    began = time.monotonic()
    parser = argparse.ArgumentParser()
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("place", nargs="*")
    arguments = parser.parse_args()
    os.environ["MOE_TK_TIMEOUT_S"] = str(LIMIT_S)  # of the ops
    ranks = ranks_of(arguments.place)
    cases, done, left = [*small_cases(ranks), *([] if arguments.small else more_cases(ranks))], 0, 0
    for index, (name, calls) in enumerate(cases):
        over = time.monotonic() - began > arguments.seconds
        if any(ranks.group.gather(over, timeout_s=LIMIT_S, step="the next case")):
            left = len(cases) - index
            break
        done += calls()
        print(f"rank {ranks.rank}: {name}: right, {time.monotonic() - began:.1f} s", flush=True)
    torch.cuda.synchronize()
    told = f"{done} calls right, {left} of {len(cases)} cases left when the time was over" if left else f"all {done} calls right"
    print(f"rank {ranks.rank} of {ranks.world}: {told}", flush=True)
    os._exit(1 if left else 0)


if __name__ == "__main__":
    main()
