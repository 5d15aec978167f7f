"""Times of moe_tk.ops.ag_gemm and gemm_rs over NVLink against the GEMM alone and against torch with NCCL, all in one run and
interleaved; checked against float64 first.

    torchrun --nproc-per-node 2 benchmarks/dense_nvlink.py --sizes 8192 --json benchmarks/results/dense_nvlink_h200.json

M = N = K = size over all ranks. ag_gemm: each rank has M / world rows and N / world columns; gemm_rs: each has K / world.
"alone" is the same kernel on a workspace in which all rows have arrived, with nothing to push or to reduce (gemm_rs: its tiles
still go to their owners); cuBLAS is torch.matmul. "fused" is a call from Python, "fused graph" the same in a CUDA graph.
"""

from __future__ import annotations

import argparse
import datetime
import json
import shlex
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from moe_tk import ops, reference
from moe_tk.group import resolve_group
from moe_tk.ops import cuda_sessions
from moe_tk.runtime.nvlink_ops import DENSE_RUN, OPEN

WARM_UP = 3
CHECKED_ROWS = 256


class Bench:
    """One op of one size on this rank."""

    def __init__(self, gathers: bool, size: int, device: torch.device) -> None:
        self.gathers, self.group = gathers, resolve_group(None)
        world, rank = self.group.world, self.group.rank
        draw = torch.Generator(device=device).manual_seed(1 + rank)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, device=device, dtype=torch.bfloat16, generator=draw)

        self.tokens = size // world
        self.x = normal(self.tokens, size) if gathers else normal(size, size // world)
        self.weight = normal(size // world, size) if gathers else normal(size, size // world)
        self.everything = torch.empty(size, self.x.shape[1], device=device, dtype=torch.bfloat16) if gathers else self.x
        self.product = torch.empty(size, self.weight.shape[0], device=device, dtype=torch.bfloat16)
        self.part = torch.empty(self.tokens, size, device=device, dtype=torch.bfloat16)
        self.fused()  # makes the workspace
        self.session = next(iter(cuda_sessions._held.values()))._latest["ag_gemm" if gathers else "gemm_rs"]

    def fused(self) -> torch.Tensor:
        return (ops.ag_gemm if self.gathers else ops.gemm_rs)(self.x, self.weight)

    def stage(self, stages: int) -> None:
        self.session.call(self.x, self.weight, self.product if self.gathers else self.part, num_tokens=self.tokens, signature=5,
                          stages=stages, timeout_s=10.0, stream=torch.cuda.current_stream())

    def cublas(self) -> None:
        torch.matmul(self.everything, self.weight.T, out=self.product)

    def nccl(self) -> torch.Tensor:
        if self.gathers:
            dist.all_gather_into_tensor(self.everything, self.x)
            return self.everything @ self.weight.T
        dist.reduce_scatter_tensor(self.part, self.x @ self.weight.T)
        return self.part

    def communicate(self) -> None:
        if self.gathers:
            dist.all_gather_into_tensor(self.everything, self.x)
        else:
            dist.reduce_scatter_tensor(self.part, self.product)

    def graph(self) -> Callable[[], object]:
        """A call in a CUDA graph."""
        captured = torch.cuda.CUDAGraph()
        self.worst(0.0)
        with torch.cuda.graph(captured, capture_error_mode="thread_local"):
            self.fused()
        return captured.replay

    def contenders(self) -> dict[str, Callable[[], object]]:
        """`alone` comes right after a call, which leaves the workspace as it needs it."""
        return {"fused": self.fused, "fused graph": self.graph(), "alone": lambda: self.stage(DENSE_RUN),
                "open": lambda: self.stage(OPEN), "cublas": self.cublas, "nccl + matmul": self.nccl, "nccl alone": self.communicate}

    def check(self) -> float:
        """Relative error of some rows of every rank's part, the largest of any rank."""
        out = self.fused()
        ops.synchronize()
        some = torch.arange(0, self.tokens, max(1, self.tokens // CHECKED_ROWS), device=out.device)
        if self.gathers:
            dist.all_gather_into_tensor(self.everything, self.x)
            rows = torch.cat([some + rank * self.tokens for rank in range(self.group.world)])
            return self.worst(reference.relative_error(out[rows], self.everything[rows].double() @ self.weight.double().T))
        rows = torch.cat([some + rank * self.tokens for rank in range(self.group.world)])
        partial = self.x[rows].double() @ self.weight.double().T
        dist.all_reduce(partial)
        mine = partial[self.group.rank * len(some):(self.group.rank + 1) * len(some)]
        return self.worst(reference.relative_error(out[some], mine))

    def worst(self, value: float) -> float:
        torch.cuda.synchronize()
        return max(self.group.gather(value, timeout_s=60, step="benchmark"))

    def run(self, repeats: int) -> dict[str, dict[str, float]]:
        """Microseconds of each contender on the slower rank: median and quartiles over interleaved rounds."""
        contenders = self.contenders()
        for _ in range(WARM_UP):
            for body in contenders.values():
                body()
        self.worst(0.0)
        events: dict[str, list] = {name: [] for name in contenders}
        for _ in range(repeats):
            for name, body in contenders.items():
                before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                before.record()
                body()
                after.record()
                events[name].append((before, after))
        torch.cuda.synchronize()
        ops.synchronize()
        result = {}
        for name, pairs in events.items():
            times = sorted(before.elapsed_time(after) * 1e3 for before, after in pairs)
            quarters = statistics.quantiles(times, n=4)
            result[name] = {"median": round(self.worst(quarters[1]), 1), "q1": round(self.worst(quarters[0]), 1),
                            "q3": round(self.worst(quarters[2]), 1)}
        return result


def environment(device: torch.device) -> dict:
    def ask(*command: str) -> str:
        try:
            return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
        except (OSError, subprocess.SubprocessError):
            return "unknown"

    return {"benchmark": "dense_nvlink", "gpu": torch.cuda.get_device_name(device), "world": dist.get_world_size(),
            "driver": ask("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "-i", "0"),
            "torch": torch.__version__, "cuda": torch.version.cuda, "nccl": ".".join(map(str, torch.cuda.nccl.version())),
            "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"), "command": shlex.join(sys.argv)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=lambda text: [int(part) for part in text.split(",")], default=[8192], help="M = N = K")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--commit", default="unknown", help="of this tree, for the record")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    dist.init_process_group("cpu:gloo,cuda:nccl")
    device = torch.device("cuda", dist.get_rank() % torch.cuda.device_count())
    torch.cuda.set_device(device)
    lines = []
    for size in args.sizes:
        for gathers in (True, False):
            bench = Bench(gathers, size, device)
            error = bench.check()
            if not error <= reference.ERROR_BUDGET[torch.bfloat16]:
                raise SystemExit(f"size {size}, {'ag_gemm' if gathers else 'gemm_rs'}: relative error {error}")
            us = bench.run(args.repeats)
            fused = us["fused graph"]["median"]
            lines.append(dict(op="ag_gemm" if gathers else "gemm_rs", size=size, error=error, us=us,
                              fused_over_alone=round(fused / us["alone"]["median"], 3),
                              fused_over_cublas=round(fused / us["cublas"]["median"], 3)))
            if dist.get_rank() == 0:
                print(json.dumps(lines[-1]), flush=True)
    if args.json and dist.get_rank() == 0:
        args.json.write_text(json.dumps({**environment(device), "commit": args.commit, "lines": lines}, indent=1) + "\n")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
