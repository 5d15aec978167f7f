"""`moe_tk bench PART`: measure one part of the system on this machine; a table on the screen, JSON in a file."""

from __future__ import annotations

import argparse

from moe_tk.cli import bench_gemm, bench_layer

PARTS = {"gemm": bench_gemm, "layer": bench_layer}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parts = parser.add_subparsers(metavar="PART", required=True)
    for name, module in PARTS.items():
        own = parts.add_parser(name, help=module.SUMMARY, description=module.SUMMARY)
        module.add_arguments(own)
        own.set_defaults(run_part=module.run)


def run(args: argparse.Namespace) -> int:
    return args.run_part(args)
