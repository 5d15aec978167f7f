"""`moe_tk bench gemm`: the grouped GEMM engine against torch, and against the roofline measured in the same run.

Candidates of a line run interleaved on the same weights; medians are reported. Every candidate is checked before it is timed.
"""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from moe_tk.bench.environment import commit, output_of
from moe_tk.errors import ArgumentError

SUMMARY = "grouped GEMM of the model shapes: TFLOP/s, GB/s of weights, share of the roofline, against torch"
SHAPES = {  # H, I, E, k
    "seed": (4096, 3072, 64, 8), "qwen3-30b-a3b": (2048, 768, 128, 8), "mixtral-8x7b": (4096, 14336, 8, 2),
    "deepseek-v3": (7168, 2048, 256, 8), "deepseek-v4-flash": (4096, 2048, 256, 6),
}
TOKENS = (64, 512, 2048, 8192)
RANKS = 2
DENSE = 8192
HBM_BYTES = 8 << 30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", action="append", choices=SHAPES, help="repeat it for several; default: all")
    parser.add_argument("--tokens", type=int, action="append", help="tokens per rank; repeat it; default: 64, 512, 2048, 8192")
    parser.add_argument("--dtype", action="append", choices=("bf16", "e4m3"), help="default: both")
    parser.add_argument("--seconds", type=float, default=600.0, help="stop starting new lines after this long")
    parser.add_argument("--out", type=Path, help="JSON file for the results")


def run(args: argparse.Namespace) -> int:
    """Print the table line by line; write the JSON after every line, so that an interrupted run keeps what it has."""
    import torch

    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        raise ArgumentError("bench gemm measures the wgmma engine: it needs a GPU of compute capability 9.0")
    torch.manual_seed(1)
    start, lines = time.monotonic(), []
    record: dict[str, Any] = {"machine": machine(), "lines": lines}
    bench = GemmBench()
    record["ceilings"] = bench.ceilings
    print(f"ceilings measured now: dense bf16 {bench.ceilings['bf16_tflops']:.0f} TFLOP/s (torch.matmul, {DENSE}^3), read "
          f"{bench.ceilings['read_gbs']:.0f} GB/s", flush=True)
    for make in (*(lambda d=d: bench.dense(d) for d in args.dtype or ("bf16", "e4m3")),
                 *(lambda s=s, g=g, t=t, d=d: bench.grouped(s, g, t, d) for d in args.dtype or ("bf16", "e4m3")
                   for s in args.shape or SHAPES for g in (1, 2) for t in args.tokens or TOKENS)):
        if time.monotonic() - start > args.seconds:
            record["stopped"] = f"after {args.seconds:.0f} s, {len(lines)} lines"
            print(f"stopped {record['stopped']}")
            break
        lines.append(attempt(make))
        print(format_line(lines[-1]), flush=True)
        record["seconds"] = round(time.monotonic() - start, 1)
        if args.out:
            args.out.write_text(json.dumps(record, indent=1))
    return 1 if any("failed" in line for line in lines) else 0


def attempt(make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """A line, or why there is none: one that fails does not cost the others."""
    try:
        return make()
    except Exception as error:
        return {"failed": f"{type(error).__name__}: {error}"[:500]}


def format_line(line: dict[str, Any]) -> str:
    if "failed" in line:
        return line["failed"]
    times = "  ".join(f"{name} {us:.0f}" for name, us in line["us"].items())
    against = f"x{line['us']['torch'] / line['us']['moe_tk']:.2f} of torch" if "torch" in line["us"] else ""
    rates = f"{line['tflops']:5.0f} TFLOP/s {line['weights_gbs']:5.0f} GB/s {line['roofline']:4.0%} of roofline"
    return (f"{line['dtype']} {line['case']:>23} T {line['tokens']:>5} M {line['rows']:>6} N {line['n']:>5} K {line['k']:>5} "
            f"{line['tile']:>16}: {rates} {against} | us: {times} | {line['clock_mhz']} MHz {line['power_w']} W"
            f"{' power-limited' * line['power_limited']}")


def machine() -> dict[str, Any]:
    """What a reader needs to repeat a run."""
    import torch

    smi = output_of("nvidia-smi", "--query-gpu=name,driver_version,clocks.max.sm,power.limit", "--format=csv,noheader")
    return {"gpu": smi or torch.cuda.get_device_name(), "torch": torch.__version__, "cuda": torch.version.cuda,
            "python": platform.python_version(), "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "command": shlex.join(["moe_tk", *sys.argv[1:]]), "commit": commit()}


class GemmBench:
    """Holds one set of weights at a time, and the two ceilings."""

    def __init__(self) -> None:
        import torch

        self.torch = torch
        self.weights: tuple[Any, ...] = ()
        self.weights_of: tuple[Any, ...] = ()
        self.clocks: dict[str, Any] = {}
        self.ceilings = self.measure_ceilings()

    def measure_ceilings(self) -> dict[str, float]:
        torch = self.torch
        a, b = (torch.randn(DENSE, DENSE, device="cuda").bfloat16() for _ in range(2))
        rate = 2 * DENSE**3 / self.time({"matmul": lambda: torch.matmul(a, b.t())}, 12)["matmul"] / 1e6
        big = torch.randn(HBM_BYTES // 4, device="cuda")
        readers = {"sum": lambda: torch.sum(big), "max": lambda: torch.amax(big)}
        read = max(HBM_BYTES / us / 1e3 for us in self.time(readers, 8).values())
        return {"bf16_tflops": rate, "read_gbs": read}

    def time(self, candidates: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
        """Median microseconds of each candidate, all interleaved, behind a backlog that hides launch gaps."""
        torch = self.torch
        for run_one in candidates.values():
            run_one()
        torch.cuda.synchronize()
        torch.cuda._sleep(200_000 * repeats * len(candidates))  # about 0.1 ms for each launch of Python
        events = []
        for _ in range(repeats):
            for name, run_one in candidates.items():
                first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                first.record()
                run_one()
                last.record()
                events.append((name, first, last))
        events[len(events) // 2][1].synchronize()
        self.clocks = read_clocks()
        torch.cuda.synchronize()
        return {name: statistics.median(f.elapsed_time(e) * 1e3 for n, f, e in events if n == name) for name in candidates}

    def dense(self, dtype: str) -> dict[str, Any]:
        """8192^3 with one expert; torch is torch.matmul or torch._scaled_mm with the same scales."""
        torch = self.torch
        x, w, scales = self.operands(dtype, (DENSE,), DENSE, DENSE)
        if dtype == "bf16":
            baseline = lambda: torch.matmul(x, w[0].t())  # noqa: E731
        else:
            block = scales["w_scale"][0, :, :, 0].contiguous()
            baseline = lambda: torch._scaled_mm(x, w[0].t(), scale_a=scales["x_scale"].t(), scale_b=block.t(),  # noqa: E731
                                                out_dtype=torch.bfloat16)
        return self.line("dense", dtype, 0, [DENSE], x, w, scales, 128, baseline, 12)

    def grouped(self, shape: str, gemm: int, tokens: int, dtype: str) -> dict[str, Any]:
        """GEMM 1 (gate and up) or 2 (down) of one of two ranks under expert parallelism, uniform routing without repeats."""
        torch = self.torch
        hidden, width, experts, top_k = SHAPES[shape]
        local, (n, k) = experts // RANKS, ((2 * width, hidden) if gemm == 1 else (hidden, width))
        ids = torch.rand(RANKS * tokens, experts, device="cuda").topk(top_k, 1).indices.flatten()
        counts = torch.bincount(ids, minlength=experts)[:local].tolist()
        row_block = 64 if sum(counts) <= 48 * local else 128
        x, w, scales = self.operands(dtype, counts, n, k, row_block, key=(shape, gemm, dtype))
        baseline = None
        if dtype == "bf16":
            packed = torch.cat([x[s:s + c] for s, c in zip(starts(counts, row_block), counts, strict=False)])
            ends = torch.tensor(counts, device="cuda").cumsum(0).int()
            baseline = lambda: torch._grouped_mm(packed, w.transpose(1, 2), offs=ends)  # noqa: E731
        repeats = 30 if tokens <= 512 else 12 if tokens <= 2048 else 6
        return self.line(f"{shape} gemm{gemm}", dtype, tokens, counts, x, w, scales, row_block, baseline, repeats,
                         activation=gemm == 1)

    def operands(self, dtype: str, counts: Any, n: int, k: int, row_block: int = 128,
                 key: Any = None) -> tuple[Any, Any, dict[str, Any]]:
        torch = self.torch
        slots = starts(counts, row_block)[-1]
        if key is None or self.weights_of != key:
            self.weights = ()
            self.weights, self.weights_of = self.make_weights(dtype, len(counts), n, k), key
        w, w_scale = self.weights
        if dtype == "bf16":
            return torch.randn(slots, k, device="cuda").bfloat16(), w, {}
        return random_e4m3(slots, k), w, {"x_scale": torch.rand(k // 128, slots, device="cuda") + 0.5, "w_scale": w_scale}

    def make_weights(self, dtype: str, experts: int, n: int, k: int) -> tuple[Any, Any]:
        torch = self.torch
        if dtype == "e4m3":
            scale = (torch.rand(experts, -(-n // 128), k // 128, 1, device="cuda") + 0.5).expand(-1, -1, -1, 2).contiguous()
            return random_e4m3(experts, n, k), scale / k**0.5
        w = torch.empty(experts, n, k, dtype=torch.bfloat16, device="cuda")
        for expert in w:
            expert.normal_(std=k**-0.5)
        return w, None

    def line(self, case: str, dtype: str, tokens: int, counts: list[int], x: Any, w: Any, scales: dict[str, Any], row_block: int,
             baseline: Callable[[], Any] | None, repeats: int, activation: bool = False) -> dict[str, Any]:
        torch = self.torch
        from moe_tk.runtime import gemm

        offsets = torch.tensor(starts(counts, row_block), dtype=torch.int32, device="cuda")
        rows = torch.tensor(counts, dtype=torch.int32, device="cuda")
        _, n, k = w.shape
        make = lambda act, offs=offsets: gemm.make_plan(x.dtype, offs, rows, num_slots=x.shape[0], columns=n,  # noqa: E731
                                                        row_block=row_block, activation=act)
        plan, out = make(False), torch.full((x.shape[0], n), torch.nan, dtype=torch.bfloat16, device="cuda")
        launch = lambda p, o, **more: gemm.launch(p, x, w, o, **scales, **more)  # noqa: E731
        candidates: dict[str, Callable[[], Any]] = {"moe_tk": lambda: launch(plan, out)}
        candidates["with_table"] = lambda: launch(make(False), out)
        if activation:
            act_plan, act_out, more = make(True), *self.activated(x, n)
            swiglu = {"alpha": 1.0, "beta": 0.0, "limit": float("inf")}
            candidates["swiglu"] = lambda: launch(act_plan, act_out, swiglu=swiglu, **more)
        if plan.variant["hooked"]:
            hooks = self.full_counters(x.shape[0] // row_block)
            candidates["hooked"] = lambda: launch(plan, out, hooks=hooks)
        failure = None
        if baseline is not None:
            try:
                baseline()
                candidates["torch"] = baseline
            except (RuntimeError, ValueError) as reason:
                failure = str(reason)[:300]
        candidates["moe_tk"]()
        error = self.check(x, w, scales, counts, starts(counts, row_block), out)
        us = self.time(candidates, repeats)
        flops, touched = 2 * sum(counts) * n * k, sum(1 for c in counts if c) * n * k * w.element_size()
        peak = self.ceilings["bf16_tflops"] * (2 if dtype == "e4m3" else 1)
        floor = max(flops / peak / 1e6, (touched + sum(counts) * (k * w.element_size() + 2 * n)) / self.ceilings["read_gbs"] / 1e3)
        return {"case": case, "dtype": dtype, "tokens": tokens, "rows": sum(counts), "n": n, "k": k, "tile": plan.variant["name"],
                "us": us, "tflops": flops / us["moe_tk"] / 1e6, "weights_gbs": touched / us["moe_tk"] / 1e3,
                "roofline": floor / us["moe_tk"], "error": error, "torch_failed": failure, **self.clocks}

    def activated(self, x: Any, n: int) -> tuple[Any, dict[str, Any]]:
        torch = self.torch
        if x.dtype == torch.bfloat16:
            return torch.empty(x.shape[0], n // 2, dtype=x.dtype, device="cuda"), {}
        return (torch.empty(x.shape[0], n // 2, dtype=x.dtype, device="cuda"),
                {"out_scale": torch.empty(n // 256, x.shape[0], device="cuda")})

    def full_counters(self, blocks: int) -> dict[str, int]:
        """Hooks over counters that are already full; self keeps them alive."""
        full = self.torch.full((4, max(blocks, 8)), 1, dtype=self.torch.int32, device="cuda")
        full[2:] = 0
        names = ("gate_arrived", "gate_want", "gate_record", "push_finished")
        self.kept = full
        return dict(zip(names, (row.data_ptr() for row in full), strict=True)) | {"gate_timeout_ns": 10**9}

    def check(self, x: Any, w: Any, scales: dict[str, Any], counts: list[int], first: list[int], out: Any) -> float:
        """Relative error of up to 64 rows of up to 8 experts against float32; raises when it is not small."""
        torch = self.torch
        busy = [e for e, c in enumerate(counts) if c][:: max(1, len(counts) // 8)]
        worst = 0.0
        for e in busy:
            rows = slice(first[e] + max(0, counts[e] - 64), first[e] + counts[e])
            left, right = x[rows].float(), w[e].float()
            if scales:
                left = left * scales["x_scale"][:, rows].t().repeat_interleave(128, 1)
                right = right * scales["w_scale"][e, :, :, 0].repeat_interleave(128, 0)[: w.shape[1]].repeat_interleave(128, 1)
            want = left @ right.t()
            error = float((out[rows].float() - want).norm() / want.norm())
            if not error <= 4e-3:
                raise ArgumentError(f"expert {e}: relative error {error} against float32; a wrong kernel is not timed")
            worst = max(worst, error)
        torch.cuda.synchronize()
        return worst


def read_clocks() -> dict[str, Any]:
    """SM clock, power and whether power limits the clock, now; zeros without NVML."""
    unknown = {"clock_mhz": 0, "power_w": 0, "power_limited": False}
    try:
        import pynvml
    except ImportError:
        return unknown
    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        reasons = pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
        return {"clock_mhz": pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM),
                "power_w": round(pynvml.nvmlDeviceGetPowerUsage(handle) / 1000),
                "power_limited": bool(reasons & pynvml.nvmlClocksThrottleReasonSwPowerCap)}
    except pynvml.NVMLError:
        return unknown


def starts(counts: Any, row_block: int) -> list[int]:
    """First slot of each expert, and the number of slots."""
    first = [0]
    for count in counts:
        first.append(first[-1] + -(-count // row_block) * row_block)
    return first


def random_e4m3(*shape: int) -> Any:
    """e4m3 values below 2 in magnitude, no NaN."""
    import torch

    out = torch.empty(*shape, dtype=torch.uint8, device="cuda")
    for part in out.view(-1, *shape[-2:]):
        part.copy_(torch.randint(0, 256, part.shape, dtype=torch.uint8, device="cuda") & 0xBF)
    return out.view(torch.float8_e4m3fn)
