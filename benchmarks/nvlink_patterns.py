"""Fused against serial on the CUDA back end: whole calls of both patterns in turns, in CUDA graphs, on the slower rank; with
--parts also the launches of the serial pattern. Both results are compared first.

    torchrun --nproc-per-node 2 benchmarks/nvlink_patterns.py --shapes seed,qwen3-30b-a3b --tokens 64,512,2048,8192 \\
        --routings uniform,zipf --json patterns.json
    torchrun --nproc-per-node 2 benchmarks/nvlink_patterns.py --dtype fp8 --parts --tiles 64,512 --json patterns_fp8.json
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import shlex
import statistics
import subprocess
import sys
import time
from dataclasses import astuple
from pathlib import Path

import torch
import torch.distributed as dist

import moe_tk
from moe_tk.bench.shapes import SHAPES
from moe_tk.planner import FUSED_VARIANTS
from moe_tk.runtime.nvlink import nvlink_module
from moe_tk.runtime.nvlink_session import COMBINE, GEMM1, GEMM2, OPEN, PULL
from moe_tk.schedule import make_routing

PATTERNS = ("two_kernel", "serial")
# GEMM 1 alone reads what GEMM 2 has left in the memory of its rows, in e4m3 bytes of other numbers; with PULL before it reads rows.
PARTS = {"open": OPEN, "open_pull": OPEN | PULL, "pull": PULL, "gemm1": GEMM1, "pull_gemm1": PULL | GEMM1, "gemm2": GEMM2,
         "open_combine": OPEN | COMBINE, "open_pull_combine": OPEN | PULL | COMBINE}
DTYPES = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}


class Line:
    """A layer with the tokens of this rank in one routing."""

    def __init__(self, layer: moe_tk.MoELayer, tokens: int, routing: str) -> None:
        self.layer = layer
        world, rank = layer.group.world, layer.group.rank
        own = slice(rank * tokens, (rank + 1) * tokens)
        drawn = make_routing(routing, max(1, world * tokens), layer.num_experts, layer.top_k, world=world, seed=1)
        draw = torch.Generator(device=layer.device).manual_seed(1 + rank)
        hidden = torch.randn(tokens, layer.hidden_size, dtype=torch.bfloat16, device=layer.device, generator=draw)
        self.args = hidden, drawn.topk_ids[own].to(layer.device), drawn.topk_weights[own].to(layer.device)
        self.out = torch.empty_like(hidden)

    def launch(self, pattern: str, stages: int | None = None) -> None:
        self.layer._calls.forward(*self.args, self.out, signature=1, stages=stages, pattern=pattern)

    def meet(self, values: list[float]) -> list[float]:
        """Waits for all ranks; the largest of each value."""
        torch.cuda.synchronize()
        return [max(column) for column in zip(*self.layer.group.gather(values, timeout_s=60, step="benchmark"), strict=True)]

    def graph(self, pattern: str, calls: int, stages: int | None = None) -> torch.cuda.CUDAGraph:
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured, capture_error_mode="thread_local"):
            for _ in range(calls):
                self.launch(pattern, stages)
        return captured

    def compare(self) -> None:
        """Both patterns must give the same finite result: they sum in the same order."""
        results = []
        for pattern in PATTERNS:
            self.out.fill_(float("nan"))
            self.launch(pattern)
            self.layer.synchronize()
            results.append(self.out.clone())
        differ = not torch.equal(*results) or not bool(results[0].isfinite().all())
        if self.meet([float(differ)])[0]:
            raise SystemExit("the patterns give different results")

    def time(self, graphs: dict[str, torch.cuda.CUDAGraph], calls: int, repeats: int) -> dict[str, list[float]]:
        """Microseconds of a call: [median, least, largest] of each graph, run in turns, on the slower rank."""
        for graph in graphs.values():
            graph.replay()
        self.meet([])
        events = {name: [] for name in graphs}
        for _ in range(repeats):
            for name, graph in graphs.items():
                pair = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                pair[0].record()
                graph.replay()
                pair[1].record()
                events[name].append(pair)
        torch.cuda.synchronize()
        found = {}
        for name, pairs in events.items():
            us = [before.elapsed_time(after) * 1e3 / calls for before, after in pairs]
            found[name] = [round(value, 1) for value in self.meet([statistics.median(us), min(us), max(us)])]
        return found

    def run(self, repeats: int, parts: bool) -> dict:
        calls = 5 if self.out.shape[0] <= 1024 else 2
        self.compare()
        self.meet([])
        found = {"us": self.time({pattern: self.graph(pattern, calls) for pattern in PATTERNS}, calls, repeats)}
        if parts:
            self.launch("serial")  # leaves its tables
            found["parts_us"] = self.time({name: self.graph("serial", calls, bits) for name, bits in PARTS.items()}, calls, repeats)
        self.layer.synchronize()
        return found

    def run_tiles(self, repeats: int) -> dict[str, list[float]]:
        """Microseconds of a serial call with each tile of its row block in both GEMMs (one without SwiGLU in the second) and of a
        fused call with each pair of tiles, weights kept in L2 or not."""
        calls, tokens = self.layer._calls, self.out.shape[0]
        tiles, chosen, graphs = nvlink_module().plain_tiles(calls.geometry.quantised), calls._plain(tokens), {}
        row_block = tiles[chosen["gemm1_tile"]]["row_block"]
        for index, tile in enumerate(tiles):
            for policy in (0, 1) if tile["row_block"] == row_block else ():
                first = index if tile["activates"] else chosen["gemm1_tile"]
                calls._plain_fields[tokens] = {**chosen, "gemm1_tile": first, "gemm2_tile": index, "gemm1_policy": policy,
                                               "gemm2_policy": policy}
                graphs[f"{tile['name']}{' evict first' if policy else ''}"] = self.graph("serial", 5)
        calls._plain_fields[tokens] = chosen
        for variant, policy in itertools.product(FUSED_VARIANTS[calls.geometry.dtype], (0, 1)):
            calls.variant, calls.weights_policy = variant.name, policy
            graphs[f"fused {variant.name}{' evict first' if policy else ''}"] = self.graph("two_kernel", 5)
        calls.variant = calls.weights_policy = None
        return self.time(graphs, 5, repeats)


def measure(shape: str, mode: str, args: argparse.Namespace, device: torch.device) -> list[dict]:
    """Lines of one layer."""
    _, hidden, inter, experts, top_k = astuple(SHAPES[shape])
    layer = moe_tk.MoELayer(num_experts=experts, top_k=top_k, hidden_size=hidden, intermediate_size=inter, mode=mode,
                            max_tokens_per_rank=max(args.tokens), protocol="nvlink", device=device, dtype=DTYPES[args.dtype])
    draw = torch.Generator(device=device).manual_seed(layer.group.rank)
    mine, columns = layer.num_local_experts, layer.local_intermediate
    options = dict(device=device, dtype=torch.bfloat16, generator=draw)
    layer.load_weights(torch.randn(mine, 2 * columns, hidden, **options) / hidden**0.5,
                       torch.randn(mine, hidden, columns, **options) / inter**0.5)
    lines = []
    for routing in args.routings:
        for tokens in args.tokens:
            line = Line(layer, tokens, routing)
            found = line.run(args.repeats, args.parts)
            lines.append(dict(shape=shape, dtype=args.dtype, mode=mode, tokens_per_rank=tokens, routing=routing,
                              auto=layer._calls.pattern_of(tokens), tiles=[tile.name for tile in layer._calls.tiles(tokens)],
                              fused_tiles=layer._calls.variant_of(tokens).name, **found))
            if tokens in args.tiles:
                lines[-1]["tiles_us"] = line.run_tiles(args.repeats)
            if layer.group.rank == 0:
                print(json.dumps(lines[-1]), flush=True)
    return lines


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def environment(device: torch.device) -> dict:
    asked = subprocess.run(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], capture_output=True, text=True)
    return {"gpu": torch.cuda.get_device_name(device), "driver": asked.stdout.split("\n")[0], "torch": torch.__version__,
            "cuda": torch.version.cuda, "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "command": shlex.join(sys.argv)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="seed,qwen3-30b-a3b", help=", ".join(SHAPES))
    parser.add_argument("--modes", default="ep")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="bf16")
    parser.add_argument("--tokens", type=numbers, default=[64, 512, 2048, 8192], help="of each rank")
    parser.add_argument("--routings", type=lambda text: text.split(","), default=["uniform"])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--parts", action="store_true", help="also time the launches of the serial pattern")
    parser.add_argument("--tiles", type=numbers, default=[], help="also time all tiles with these numbers of tokens")
    parser.add_argument("--seconds", type=float, default=600, help="begin no further layer after this time")
    parser.add_argument("--commit", default="", help="kept in the results")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    dist.init_process_group("cpu:gloo,cuda:nccl")
    device = torch.device("cuda", dist.get_rank() % torch.cuda.device_count())
    torch.cuda.set_device(device)
    began, lines = time.monotonic(), []
    for mode in args.modes.split(","):
        for shape in args.shapes.split(","):
            late = [None] * dist.get_world_size()
            dist.all_gather_object(late, time.monotonic() - began > args.seconds)
            if any(late):
                print(f"no time left for {shape} {mode}", flush=True)
                continue
            lines += measure(shape, mode, args, device)
            torch.cuda.empty_cache()
            if args.json and dist.get_rank() == 0:
                head = {"benchmark": "nvlink_patterns", "commit": args.commit, **environment(device), "lines": lines}
                args.json.write_text(json.dumps(head, indent=1) + "\n")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
