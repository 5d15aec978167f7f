"""Times of the fused layer over NVLink by launch and by stage: whole calls one by one, in CUDA graphs of one call and of
several, the first kernels, and the GEMM kernels alone. Checked against the reference first.

    torchrun --nproc-per-node 2 benchmarks/nvlink_layer.py --shapes seed,qwen3-30b-a3b --tokens 64,512,2048,8192 \\
        --modes ep,tp --graphs 1,10 --json nvlink.json
"""

from __future__ import annotations

import argparse
import datetime
import json
import shlex
import statistics
import sys
from collections.abc import Callable
from dataclasses import astuple
from pathlib import Path

import torch
import torch.distributed as dist

import moe_tk
from moe_tk import reference
from moe_tk.bench.shapes import SHAPES
from moe_tk.runtime.nvlink_session import GATHER, OPEN, SCATTER
from moe_tk.weights import shard_weights
from moe_tk.weights.gemm import dequantise_rows, dequantise_weights, quantise_rows
from moe_tk.weights.scaled import quantised

STAGES = {"open": OPEN, "open_gather": OPEN | GATHER, "all": OPEN | GATHER | SCATTER, "gemm1": GATHER, "gemm2": SCATTER}
CHECKED_TOKENS = 64
WARM_UP = 3
DTYPES = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}
FLOPS_PER_S, BYTES_PER_S = {"bf16": 795e12, "fp8": 1458e12}, 4.59e12  # of one H200, measured


class Dequantised:
    """Values of e4m3 weights, one expert at a time: all of them at once would be four times as large."""

    def __init__(self, weights: torch.Tensor, scales: torch.Tensor) -> None:
        self.weights, self.scales, self.shape = weights, scales, weights.shape

    def __getitem__(self, expert: int) -> torch.Tensor:
        return dequantise_weights(self.weights[expert:expert + 1], self.scales[expert:expert + 1])[0]


class Bench:
    """One layer with data of `tokens` tokens on this rank, uniform routing."""

    def __init__(self, layer: moe_tk.MoELayer, tokens: int, weights: tuple[torch.Tensor, torch.Tensor], repeats: int) -> None:
        self.layer, self.weights, self.repeats = layer, weights, repeats
        draw = torch.Generator(device=layer.device).manual_seed(1 + layer.group.rank)
        options = dict(device=layer.device, generator=draw)
        self.hidden = torch.randn(tokens, layer.hidden_size, dtype=torch.bfloat16, **options)
        self.ids = torch.rand(tokens, layer.num_experts, **options).topk(layer.top_k, 1).indices
        self.routing_weights = torch.rand(tokens, layer.top_k, **options)
        self.out = torch.full_like(self.hidden, float("nan"))

    def launch(self, stages: int) -> None:
        self.layer._calls.forward(self.hidden, self.ids, self.routing_weights, self.out, signature=1, stages=stages)

    def meet(self, value: float = 0.0) -> float:
        """Waits for all ranks, on device and host; the largest value of any rank."""
        torch.cuda.synchronize()
        return max(self.layer.group.gather(value, timeout_s=60, step="benchmark"))

    def check(self) -> float:
        """Relative error of a call's first tokens."""
        self.launch(STAGES["all"])
        self.layer.synchronize()
        some = slice(0, CHECKED_TOKENS)
        rows = self.hidden[some]
        if self.layer.dtype != torch.bfloat16:
            rows = dequantise_rows(*quantise_rows(rows))
        want = reference.moe_layer(rows, self.ids[some], self.routing_weights[some], *self.weights)
        return self.meet(reference.relative_error(self.out[some], want))

    def time(self, body: Callable[[], None], calls: int) -> float:
        """Microseconds of a call on the slower rank: median of `repeats` runs of `body`, which makes `calls` calls."""
        for _ in range(WARM_UP):
            body()
        self.meet()
        events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(self.repeats)]
        for before, after in events:
            before.record()
            body()
            after.record()
        torch.cuda.synchronize()
        return self.meet(statistics.median(before.elapsed_time(after) for before, after in events) * 1e3 / calls)

    def graph(self, stages: int, calls: int) -> float:
        """The same for a CUDA graph of `calls` calls."""
        captured = torch.cuda.CUDAGraph()
        self.meet()
        with torch.cuda.graph(captured, capture_error_mode="thread_local"):
            for _ in range(calls):
                self.launch(stages)
        return self.time(captured.replay, calls)

    def run(self, graphs: list[int]) -> dict[str, float]:
        """Microseconds by what was launched and how."""
        us = {"all eager": self.time(lambda: self.launch(STAGES["all"]), 1)}
        for calls in graphs:
            us[f"all graph of {calls}"] = self.graph(STAGES["all"], calls)
        for name in ("open", "open_gather"):
            us[name] = self.graph(STAGES[name], 1)
        self.launch(STAGES["all"])  # leaves the tables and full counters of a whole call, on which nothing waits
        for name in ("gemm1", "gemm2"):
            us[name] = self.graph(STAGES[name], 1)
        self.layer.synchronize()
        return us


def floor_us(shape: str, mode: str, tokens: int, world: int, dtype: str) -> float:
    """The larger of the times of the FLOPs and of the weights, all of them touched."""
    _, hidden, inter, experts, top_k = astuple(SHAPES[shape])
    flops = tokens * top_k * 6 * hidden * inter  # EP: a rank's share of all pairs; TP: all pairs, a share of the columns
    weights = experts * 3 * hidden * inter * DTYPES[dtype].itemsize / world
    return max(flops / FLOPS_PER_S[dtype], weights / BYTES_PER_S) * 1e6


def load(layer: moe_tk.MoELayer, w13: torch.Tensor, w2: torch.Tensor, part: dict) -> tuple:
    """Gives the layer its part of the weights; returns the values of all of them, for the reference."""
    if layer.dtype == torch.bfloat16:
        layer.load_weights(*shard_weights(w13, w2, **part))
        return w13, w2
    (q13, s13), (q2, s2) = quantised(w13, None), quantised(w2, None)
    mine = (w.view(q13.dtype) for w in shard_weights(q13.view(torch.uint8), q2.view(torch.uint8), **part))
    w13_scale, w2_scale = shard_weights(s13, s2, **part)
    layer.load_weights(*mine, w13_scale=w13_scale, w2_scale=w2_scale)
    return Dequantised(q13, s13), Dequantised(q2, s2)


def measure(shape: str, mode: str, args: argparse.Namespace, device: torch.device) -> list[dict]:
    """Lines of one layer."""
    _, hidden, inter, experts, top_k = astuple(SHAPES[shape])
    layer = moe_tk.MoELayer(num_experts=experts, top_k=top_k, hidden_size=hidden, intermediate_size=inter, mode=mode,
                            max_tokens_per_rank=max(args.tokens), protocol="nvlink", pattern="two_kernel", device=device,
                            row_block=args.row_block, dtype=DTYPES[args.dtype])
    layer._calls.passes, layer._calls.variant, layer._calls.weights_policy = args.passes, args.variant, args.weights_policy
    draw = torch.Generator(device=device).manual_seed(0)
    w13 = torch.randn(experts, 2 * inter, hidden, device=device, dtype=torch.bfloat16, generator=draw) / hidden**0.5
    w2 = torch.randn(experts, hidden, inter, device=device, dtype=torch.bfloat16, generator=draw) / inter**0.5
    world, rank = layer.group.world, layer.group.rank
    weights = load(layer, w13, w2, dict(mode=mode, world=world, rank=rank))
    del w13, w2
    lines = []
    for tokens in args.tokens:
        bench = Bench(layer, tokens, weights, args.repeats)
        error = bench.check()
        if not error <= reference.ERROR_BUDGET[DTYPES[args.dtype]]:
            raise SystemExit(f"{shape} {mode} T={tokens}: relative error {error}")
        us = {name: round(value, 1) for name, value in bench.run(args.graphs).items()}
        lines.append(dict(shape=shape, dtype=args.dtype, mode=mode, tokens_per_rank=tokens, error=error, us=us,
                          floor_us=round(floor_us(shape, mode, tokens, world, args.dtype), 1)))
        if rank == 0:
            print(json.dumps(lines[-1]), flush=True)
    return lines


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="seed,qwen3-30b-a3b", help=", ".join(SHAPES))
    parser.add_argument("--modes", default="ep,tp")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="bf16")
    parser.add_argument("--tokens", type=numbers, default=[64, 512, 2048, 8192], help="of each rank")
    parser.add_argument("--graphs", type=numbers, default=[1, 10], help="calls of a CUDA graph")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--passes", type=int, default=1, help="over the columns of GEMM 2, 1 to 4")
    parser.add_argument("--row-block", type=int, choices=(64, 128), help="slots of a row block; default: chosen by the size")
    parser.add_argument("--variant", help="name of the pair of fused GEMMs, of moe_tk.planner.FUSED_VARIANTS; default: by the size")
    parser.add_argument("--weights-policy", type=int, choices=(0, 1), help="0: weights stay in L2, 1: they leave it first")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    dist.init_process_group("cpu:gloo,cuda:nccl")
    device = torch.device("cuda", dist.get_rank() % torch.cuda.device_count())
    torch.cuda.set_device(device)
    lines = []
    for shape in args.shapes.split(","):
        for mode in args.modes.split(","):
            lines += measure(shape, mode, args, device)
    if args.json and dist.get_rank() == 0:
        head = {"benchmark": "nvlink_layer", "gpu": torch.cuda.get_device_name(device), "torch": torch.__version__,
                "cuda": torch.version.cuda, "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
                "command": shlex.join(sys.argv), "lines": lines}
        args.json.write_text(json.dumps(head, indent=1) + "\n")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
