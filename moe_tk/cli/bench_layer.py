"""`moe_tk bench layer`: the whole layer against its floor and against rivals, in one run (docs/benchmarks.md)."""

from __future__ import annotations

import argparse
import sys
import time
from typing import TYPE_CHECKING, Any

from moe_tk.errors import ArgumentError

if TYPE_CHECKING:
    from moe_tk.bench.options import Options

WIDTH = 132  # of tables that go to a file
SUMMARY = "the whole layer: us of a call against the floor of its routing and against rivals, interleaved"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Values stay text here: moe_tk.bench.options checks them, so that every bad one is one line."""
    parser.description = (
        "Measure the whole layer on this machine: correctness first, then all contenders in turns; median of the slower rank. By "
        "itself it starts one rank for each GPU; also under torchrun --nproc-per-node N -m moe_tk bench layer. Status: 0 all "
        "contenders right, 1 some contender failed, 2 bad arguments.")
    add = parser.add_argument
    add("--shape", action="append", metavar="NAMES", help="names with commas between, all, or H,I,E,k; repeat it (default: all)")
    add("--tokens", metavar="LIST", help="of each rank (default 64,512,2048,8192)")
    add("--mode", default="both", help="ep, tp or both (default)")
    add("--dtype", default="bf16", metavar="LIST", help="bf16 (default), e4m3")
    add("--routing", action="append", metavar="NAME", help="balanced, uniform (default), zipf[:S], hot[:EXPERT], hot_rank[:RANK], "
        "trace[:LAYER], flame[:LAYER], or FILE[#KEY] with expert ids [n, k] (.npz .npy .safetensors .pt); repeat it")
    add("--pattern", metavar="LIST", help="of ours (default two_kernel,serial,auto; on the CPU two_kernel,serial)")
    add("--against", default="torch,triton", metavar="LIST", help="rivals: torch, triton, deepgemm, flashinfer; serial: "
        "our serial pattern as what the others are compared with; or none (default torch,triton)")
    add("--backend", default="auto", help="auto (default), cuda or cpu")
    add("--world", metavar="N", help="ranks (default: all GPUs; cpu: 2)")
    add("--rounds", default="15", metavar="N", help="samples of each contender (default 15)")
    add("--calls", metavar="N", help="calls of a sample (default 8, 4, 2 for T up to 512, 2048, beyond)")
    add("--pause-ms", default="2", metavar="MS", help="before each sample (default 2)")
    add("--sustained", nargs="?", const="1", metavar="SECONDS", help="also back to back for so long (default 1)")
    add("--eager", action="store_true", help="also without CUDA graphs, launches by the host included")
    add("--flush-l2", action="store_true", help="empty the L2 cache before each call (default: no)")
    add("--attribute", action="store_true", help="also GEMMs alone, communication alone, exposed time, overlap")
    add("--sweep", metavar="WHAT", help="comm-sms: also by the number of blocks that send rows")
    add("--hbm-tbs", metavar="X", help="of the floor: HBM read, TB/s (default 4.59)")
    add("--bf16-tflops", metavar="X", help="(default 795)")
    add("--fp8-tflops", metavar="X", help="(default 1458)")
    add("--wire-gbs", metavar="X", help="each way, both ways busy, GB/s (default 364)")
    add("--doctor", metavar="FILE", help="take the rate of the wire from a report of moe_tk doctor")
    add("--seed", default="0", metavar="N")
    add("--json", metavar="FILE", help="write everything to FILE, after every line")
    add("--plot", metavar="FILE", help="draw the times over T as SVG")
    add("--limit-s", default="3600", metavar="S", help="of the whole run (default 3600)")
    add("--debug", action="store_true", help="show the traceback of a rank that fails")


def run(args: argparse.Namespace) -> int:
    """One run. Returns 0 if no contender failed, 1 if one did, 2 for bad arguments."""
    from moe_tk.bench.options import parse_options
    from moe_tk.bench.start import collect
    from moe_tk.demo.start import prints_here

    try:
        options = parse_options(args)
        report = Report(options)
        with report.progress(quiet=not prints_here()) as say:
            lines = collect(options, say)
    except ArgumentError as error:
        if prints_here():
            print(f"moe_tk bench layer: {error}", file=sys.stderr)
        return 2
    return 0 if lines is None else report.present(lines)


class Report:
    """What is written while lines come, and shown at the end."""

    def __init__(self, options: Options) -> None:
        self.options, self.begin, self.so_far = options, time.monotonic(), []
        self._environment: dict[str, Any] | None = None

    def progress(self, *, quiet: bool) -> Any:
        from moe_tk.bench.progress import ShowProgress

        return ShowProgress(self.options.total_lines, self._keep, quiet=quiet)

    def _keep(self, line: dict[str, Any]) -> None:
        self.so_far.append(line)
        self._write(self.so_far)

    def _write(self, lines: list[dict[str, Any]]) -> None:
        from moe_tk.bench.environment import environment
        from moe_tk.bench.export import to_json, write_json

        if self.options.json_path is not None:
            self._environment = self._environment or environment()
            write_json(self.options.json_path, to_json(self.options, self._environment, lines, time.monotonic() - self.begin))

    def present(self, lines: list[dict[str, Any]]) -> int:
        from moe_tk.bench.export import write_text
        from moe_tk.bench.plot import picture
        from moe_tk.bench.report import show
        from moe_tk.demo.report import ReportConsole

        self._write(lines)
        if self.options.plot_path is not None:
            write_text("--plot", self.options.plot_path, picture(lines))
        wide = None if sys.stdout.isatty() else WIDTH
        show(ReportConsole(width=wide), lines, backend=self.options.backend, how=how_timed(self.options))
        failed = any(contender["state"] == "failed" for line in lines for contender in line["contenders"])
        return 1 if failed else 0


def how_timed(options: Options) -> str:
    """One paragraph below the tables."""
    where = "wall clock" if options.backend == "cpu" else "calls in CUDA graphs (e: eager) between CUDA events"
    cache = "L2 flushed before each call" if options.flush_l2 else "L2 as the calls leave it"
    baseline = " baseline: our own serial pattern, counted with the rivals." if "serial" in options.against else ""
    return (f"Medians of {options.rounds} rounds of the slower rank, contenders in turns, {options.pause_ms:g} ms pause; {where}; "
            f"{cache}. Floor: the largest of w(eights), f(lops), wire of the actual routing at {options.numbers.hbm_tbs:g} TB/s, "
            f"{options.numbers.bf16_tflops:g} (bf16) or {options.numbers.fp8_tflops:g} (e4m3) TFLOP/s, "
            f"{options.numbers.wire_gbs:g} GB/s. Bold: the best of ours and of the rivals.{baseline}")
