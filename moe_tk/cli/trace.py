"""`moe_tk trace`: who did what when inside one call of the layer, as a table, a Perfetto trace and a picture."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from moe_tk.errors import ArgumentError, MoETkError

if TYPE_CHECKING:
    from moe_tk.trace.model import Trace
    from moe_tk.trace.options import Options, Point


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Values stay text here: moe_tk.trace.options checks them, so that every bad one is one line."""
    parser.description = (
        "Record who did what when inside the kernels of one call of the layer, on random weights and tokens; print what each "
        "kernel waited for, and write a Perfetto trace (ui.perfetto.dev opens it) and a picture. One process per GPU is started, "
        "or those of torchrun are used: torchrun --nproc-per-node N -m moe_tk trace. Recording is a build of its own and slows "
        "the call a little. Status: 0 done, 1 failed, 2 bad arguments.")
    add = parser.add_argument
    add("--shape", default=None, metavar="NAME", help="names of models as in moe_tk bench layer, with commas between, or H,I,E,k "
        "(default: qwen3-30b-a3b; 256,128,16,4 on the CPU)")
    add("--tokens", default=None, metavar="N", help="tokens of each rank, with commas between (default: 2048; 256 on the CPU)")
    add("--mode", default="ep", metavar="MODE", help="ep (default), tp or both with a comma between")
    add("--backend", default="auto", metavar="NAME", help="auto (default), cuda or cpu")
    add("--world", metavar="N", help="ranks (default: one per GPU, 2 on the CPU; under torchrun: as many as there are)")
    add("--routing", default="uniform", metavar="NAME", help="uniform (default), zipf, hot_expert, hot_rank, balanced")
    add("--seed", default="0", metavar="N", help="of tokens, weights and routing (default 0)")
    add("--blocks", default="all", metavar="N", help="blocks of each rank in the Perfetto trace (default: all)")
    add("--out", metavar="FILE", help="write the Perfetto trace to FILE, compressed if it ends in .gz; with several calls their "
        "names are put into it")
    add("--picture", metavar="FILE", help="write an SVG picture to FILE, likewise")
    add("--json", metavar="FILE", help="write the numbers of the table to FILE")
    add("--debug", action="store_true", help="show the tracebacks of ranks that fail")
    parser.error = _refuse  # one line, without the usage


def _refuse(message: str) -> NoReturn:
    print(f"moe_tk trace: {message} (see moe_tk trace --help)", file=sys.stderr)
    raise SystemExit(2)


def run(args: argparse.Namespace) -> int:
    """One run. Returns 0, or 2 for bad arguments."""
    from moe_tk.demo.start import prints_here
    from moe_tk.trace.options import DEFAULT_SHAPE, DEFAULT_TOKENS, parse_options
    from moe_tk.trace.start import choose_backend, hoppers, record_all

    try:
        backend = "cpu" if args.backend == "cpu" or (args.backend == "auto" and hoppers() == 0) else "cuda"
        args.shape, args.tokens = args.shape or DEFAULT_SHAPE[backend], args.tokens or DEFAULT_TOKENS[backend]
        options = parse_options(args)
        if options.backend == "cuda":
            choose_backend(options)
        traces = record_all(options)
    except ArgumentError as error:
        if prints_here():
            print(f"moe_tk trace: {error}", file=sys.stderr)
        return 2
    if traces is not None:
        _present(options, traces)
    return 0


def _present(options: Options, traces: list[Trace]) -> None:
    from moe_tk.bench.environment import environment
    from moe_tk.trace.show import show
    from moe_tk.trace.summary import summarise

    summaries = []
    for point, trace in zip(options.points, traces, strict=True):
        summaries.append(summarise(trace))
        show(summaries[-1])
        _write_files(options, point, trace)
    if options.json_path is not None:
        text = json.dumps({"command": "moe_tk trace", "environment": environment(), "calls": summaries}, indent=1)
        _written("--json", Path(options.json_path), lambda path: path.write_text(text + "\n"))


def _write_files(options: Options, point: Point, trace: Trace) -> None:
    from moe_tk.trace import perfetto, picture
    from moe_tk.trace.options import path_of

    if options.out is not None:
        _written("--out", path_of(options.out, point, options.points), lambda path: perfetto.write(trace, path, options.blocks))
    if options.picture is not None:
        _written("--picture", path_of(options.picture, point, options.points), lambda path: path.write_text(picture.draw(trace)))


def _written(name: str, path: Path, write) -> None:
    try:
        write(path)
    except OSError as error:
        raise MoETkError(f"{name} {path}: cannot be written: {error.strerror}") from error
    print(f"written: {path}")
