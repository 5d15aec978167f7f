"""`moe_tk demo`: the real layer on its real input through every pattern, checked and shown."""

from __future__ import annotations

import argparse
import sys
import time
from typing import TYPE_CHECKING, NoReturn

from moe_tk.errors import ArgumentError, MoETkError

if TYPE_CHECKING:
    from moe_tk.demo.options import Options
    from moe_tk.demo.records import RankRecord


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Values stay text here: moe_tk.demo.options checks them, so that every bad one is one line."""
    parser.description = (
        "Run one layer of a trained model on its real input through every pattern, on ranks that are processes of this machine, "
        "with a GPU each or on the CPU; check it against the float64 reference; show what happened inside. Also under torchrun: "
        "torchrun --nproc-per-node N -m moe_tk demo. Status: 0 all errors within budget and repeats equal, 1 not, 2 bad arguments.")
    add = parser.add_argument
    add("--world", metavar="N", help="ranks, 1 to 8 (default 4, on GPUs one each; under torchrun: as many as there are)")
    add("--mode", default="both", metavar="MODE", help="ep, tp or both (default)")
    add("--pattern", default="all", metavar="LIST",
        help="serial, two_kernel, mega, with commas between (default: all that the back end has)")
    add("--backend", default="auto", metavar="NAME", help="cpu, cuda (Hopper GPUs), or auto (default): GPUs where they can do it")
    add("--tokens", default="4096", metavar="N", help="tokens of all ranks together, 1 to 4096 (default 4096)")
    add("--uneven", action="store_true", help="give rank 1 half a share of the tokens and the last rank none")
    add("--calls", metavar="N", help="timed calls of each pattern (default 7; on a slow machine as few as 3)")
    add("--json", metavar="FILE", help="write everything to FILE too")
    add("--debug", action="store_true", help="show the tracebacks of ranks that fail")
    parser.error = _refuse  # one line, without the usage


def _refuse(message: str) -> NoReturn:
    print(f"moe_tk demo: {message} (see moe_tk demo --help)", file=sys.stderr)
    raise SystemExit(2)


def run(args: argparse.Namespace) -> int:
    """One run. Returns 0 if every result passed, 1 if not, 2 for bad arguments."""
    from moe_tk.demo.options import parse_options
    from moe_tk.demo.start import prints_here

    begin = time.monotonic()
    try:
        options = parse_options(args)
        records = _collect(options)
    except ArgumentError as error:
        if prints_here():
            print(f"moe_tk demo: {error}", file=sys.stderr)
        return 2
    return 0 if records is None else _present(options, records, begin)


def _collect(options: Options) -> list[RankRecord] | None:
    """The records of all ranks; None on a rank that does not print."""
    from moe_tk.demo.progress import ShowProgress
    from moe_tk.demo.start import join_ranks, prints_here, start_ranks, under_launcher

    total = len(options.modes) * len(options.patterns) * (options.calls + 2)
    with ShowProgress(total, quiet=not prints_here()) as show:
        return (join_ranks if under_launcher() else start_ranks)(options, show)


def _present(options: Options, records: list[RankRecord], begin: float) -> int:
    from moe_tk.demo.export import to_json, write_json
    from moe_tk.demo.report import ReportConsole, show
    from moe_tk.demo.results import merge

    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a terminal without our few signs still gets the rest
    results, seconds = merge(records), time.monotonic() - begin
    show(ReportConsole(), records, results, seconds)
    if options.json_path is not None:
        try:
            write_json(options.json_path, to_json(options, records, results, seconds))
        except OSError as error:
            raise MoETkError(f"--json {options.json_path}: cannot be written: {error.strerror}") from error
    return 0 if all(result.passed for result in results) else 1
