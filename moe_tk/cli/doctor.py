"""`moe_tk doctor`: read this machine (or a saved report of another) and say what will be used, why, and what to do."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

from moe_tk.config import env
from moe_tk.diagnose import diagnose
from moe_tk.errors import MoETkError
from moe_tk.topology.findings import WILL_NOT_WORK
from moe_tk.topology.probe_run import Limits
from moe_tk.topology.report import Report, facts_from_json, make_report, report_to_json
from moe_tk.topology.wishes import PROTOCOLS, chosen_protocol

PROTOCOL_CHOICES = ("auto", *PROTOCOLS)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = ("Read this machine: GPUs, how each pair is connected, the protocol that follows and why, "
                          "what is "
                          "wrong and what to do. Exit status: 0 good, 1 works with warnings, 2 will not work.")
    parser.add_argument("--probe", nargs="?", const="full", choices=("quick", "full"), metavar="quick|full",
                        help="verify by moving data: quick checks correctness and latency, full (the default of this "
                             "option) also measures bandwidth and what it costs a GEMM; results are kept")
    parser.add_argument("--group", type=int, metavar="N",
                        help="rank the possible groups of N GPUs by a layer's exchange")
    parser.add_argument("--world", type=int, metavar="N", help="judge the first N visible GPUs instead of all")
    parser.add_argument("--protocol", choices=PROTOCOL_CHOICES, help="what if this protocol were asked for")
    parser.add_argument("--json", action="store_true", help="print the whole report as JSON")
    parser.add_argument("--save", metavar="FILE", help="write the report to FILE, for --snapshot elsewhere")
    parser.add_argument("--snapshot", metavar="FILE", help="analyse a saved report instead of this machine")
    parser.add_argument("--no-cache", action="store_true", help="do not use what earlier probes found")
    parser.add_argument("--limit", type=float, default=Limits().total_s, metavar="S",
                        help="seconds that all probes together may take (default %(default)g)")
    parser.add_argument("--step-limit", type=float, default=Limits().step_s, metavar="S",
                        help="seconds after which one probe counts as hung (default %(default)g)")
    parser.add_argument("--width", type=int, metavar="COLUMNS", help="width of the output (default: the terminal's)")
    parser.add_argument("--debug", action="store_true", help="show a traceback if something goes wrong in here")


def run(args: argparse.Namespace) -> int:
    """Print the report; 0 good, 1 works with warnings, 2 will not work (also for wrong arguments and files)."""
    try:
        report = _make(args)
        if args.save:
            _save(Path(args.save), report)
        if args.json:
            print(json.dumps(report_to_json(report), indent=1))
        else:
            from moe_tk.cli.doctor_view import show

            show(report, width=args.width)
            if args.save:
                print(f"report written to {args.save}", file=sys.stderr)
        return report.exit_code
    except (MoETkError, OSError) as error:
        if args.debug:
            raise
        print(f"moe_tk doctor: {error}", file=sys.stderr)
    except BrokenPipeError:
        raise
    except Exception as error:
        if args.debug:
            raise
        where = traceback.extract_tb(error.__traceback__)[-1]
        print(f"moe_tk doctor: unexpected {type(error).__name__}: {error} (in {where.name}); --debug shows where. "
              f"Please "
              "report it.", file=sys.stderr)
    return WILL_NOT_WORK


def _make(args: argparse.Namespace) -> Report:
    if args.snapshot:
        data = _read(Path(args.snapshot))
        snapshot, probes = facts_from_json(data)
        wish, by = chosen_protocol(args.protocol)
        return make_report(snapshot, probes, world=args.world, override=wish, override_by=_by(by),
                           group_size=args.group, source=args.snapshot)
    limits = Limits(step_s=args.step_limit, total_s=args.limit)
    progress = _Progress() if args.probe and sys.stderr.isatty() else None
    try:
        return diagnose(probe=args.probe, world=args.world, protocol=args.protocol, group_size=args.group,
                        use_cache=not args.no_cache, limits=limits, progress=progress)
    finally:
        if progress is not None:
            progress.clear()


def _by(by: str) -> str:
    return by if env("MOE_TK_PROTOCOL") and by == "MOE_TK_PROTOCOL" else "--protocol"


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise MoETkError(f"{path} is not JSON: {error}") from None


def _save(path: Path, report: Report) -> None:
    """Whole or not at all."""
    handle, temporary = tempfile.mkstemp(dir=path.absolute().parent, prefix=f".{path.name}-")
    try:
        with os.fdopen(handle, "w") as file:
            json.dump(report_to_json(report), file, indent=1)
            file.write("\n")
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


class _Progress:
    """One line on stderr that says which probe runs."""

    def __call__(self, number: int, count: int, step: dict[str, Any]) -> None:
        what = step.get("kind") or step.get("load") or ""
        print(f"\r\033[Kprobing {number + 1}/{count}: {step['do']} {what}", end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        print("\r\033[K", end="", file=sys.stderr, flush=True)
