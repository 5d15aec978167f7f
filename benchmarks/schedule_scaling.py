"""How the time of building the schedule tables grows with the number of (token, k) pairs.

Builds the tables of one rank with the vectorised builder (fixed shapes, as a CUDA graph would run it) for 1 to 8 ranks
and up to 8192 tokens each, checks each build against the invariants, and with the golden loops where these are quick
enough. Linear means: nanoseconds per pair do not grow.

    PYTHONPATH=. python benchmarks/schedule_scaling.py --json benchmarks/results/schedule_scaling.json
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from moe_tk.schedule import build_padded, build_tables, check_tables, make_routing, trim

GRID = [(1, 512), (1, 2048), (8, 512), (1, 8192), (4, 2048), (8, 2048), (2, 8192), (4, 8192), (8, 8192)]  # (ranks, T)
GOLDEN_PAIRS = 2**17  # golden loops up to this many pairs


def _milliseconds(call: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - start)


def measure(world: int, tokens: int, args: argparse.Namespace, device: torch.device) -> dict:
    """One row of the result: a checked build, then its median time and spread."""
    routing = make_routing(args.routing, world * tokens, args.experts, args.top_k, world=world, seed=1)
    ids = routing.topk_ids.to(device)
    counts = torch.full((world,), tokens, dtype=torch.int32, device=device)
    sizes = dict(world=world, rank=0, num_experts=args.experts, mode=args.mode, row_block=128, segments=args.segments)
    check_tables(trim(build_padded(ids, counts, **sizes)), ids)
    times = [_milliseconds(lambda: build_padded(ids, counts, **sizes), device) for _ in range(args.repeats + 5)][5:]
    pairs = ids.numel()
    golden = None
    if pairs <= GOLDEN_PAIRS:
        host = ids.cpu()
        golden = _milliseconds(lambda: build_tables(host, token_counts=[tokens] * world, impl="golden", **sizes),
                               torch.device("cpu"))
    median = statistics.median(times)
    return dict(world=world, tokens_per_rank=tokens, pairs=pairs, vectorised_ms=median, vectorised_min_ms=min(times),
                vectorised_max_ms=max(times), vectorised_ns_per_pair=1e6 * median / pairs,
                golden_ns_per_pair=None if golden is None else 1e6 * golden / pairs)


def machine(device: torch.device) -> dict:
    """What the times depend on."""
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        names = [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if "model name" in line]
        cpu = names[0] if names else cpu
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    return dict(cpu=cpu, threads=torch.get_num_threads(), gpu=gpu, system=platform.system())


def show(rows: list[dict], console: Console) -> None:
    table = Table("ranks", "T", "pairs", "median ms", "min", "max", "ns/pair", "golden ns/pair",
                  title="schedule tables of one rank", caption="linear: ns/pair does not grow with pairs")
    for column in table.columns:
        column.justify = "right"
    for row in rows:
        golden = "" if row["golden_ns_per_pair"] is None else f"{row['golden_ns_per_pair']:.0f}"
        table.add_row(str(row["world"]), str(row["tokens_per_rank"]), str(row["pairs"]), f"{row['vectorised_ms']:.2f}",
                      f"{row['vectorised_min_ms']:.2f}", f"{row['vectorised_max_ms']:.2f}",
                      f"{row['vectorised_ns_per_pair']:.0f}", golden)
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--segments", type=int, default=4)
    parser.add_argument("--mode", choices=["ep", "tp"], default="ep")
    parser.add_argument("--routing", default="uniform")
    parser.add_argument("--repeats", type=int, default=31)
    parser.add_argument("--device", default="cpu", help="cpu (default) or cuda")
    parser.add_argument("--json", type=Path, help="write the record here")
    args = parser.parse_args()
    device, console = torch.device(args.device), Console()
    rows = [measure(world, tokens, args, device)
            for world, tokens in track(GRID, description="building", console=console)]
    show(rows, console)
    if args.json:
        record = dict(
            benchmark="schedule_scaling", date=datetime.datetime.now(datetime.timezone.utc).isoformat("T", "seconds"),
            command=shlex.join(["python", *sys.argv]), machine=machine(device),
            versions=dict(python=platform.python_version(), torch=torch.__version__), experts=args.experts,
            top_k=args.top_k, segments=args.segments, mode=args.mode, routing=args.routing, repeats=args.repeats,
            row_block=128, rows=rows)
        args.json.write_text(json.dumps(record, indent=1) + "\n")
        console.print(f"wrote {args.json}")


if __name__ == "__main__":
    main()
