"""Entry of the `moe_tk` command. Subcommands are listed in one table and imported only when used."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import moe_tk
from moe_tk.errors import MoETkError


@dataclass(frozen=True, slots=True)
class Subcommand:
    """`module` has add_arguments(parser) and run(args) -> exit status. A module that is not there is not offered."""

    name: str
    module: str
    summary: str


SUBCOMMANDS = (
    Subcommand("demo", "moe_tk.cli.demo", "run the layer on its real input and check it against the reference"),
    Subcommand("doctor", "moe_tk.cli.doctor", "read this machine and say what will be used, and why"),
    Subcommand("plan", "moe_tk.cli.plan", "print what fusion could gain for a shape on a machine, and the pattern that follows"),
    Subcommand("explain-timeout", "moe_tk.cli.explain_timeout", "draw who waited for whom from a wait record"),
    Subcommand("build", "moe_tk.cli.build", "compile the native modules ahead of their first use"),
    Subcommand("bench", "moe_tk.cli.bench", "measure a part of the system on this machine and write the table"),
    Subcommand("trace", "moe_tk.cli.trace", "record who did what when inside one call of the layer"),
)


def available(subcommands: Sequence[Subcommand] = SUBCOMMANDS) -> list[Subcommand]:
    """Those whose module exists; none is imported."""
    return [sub for sub in subcommands if importlib.util.find_spec(sub.module) is not None]


def make_parser(argv: Sequence[str], subcommands: Sequence[Subcommand]) -> argparse.ArgumentParser:
    """Parser of the whole command line; only the module of the subcommand that `argv` names is imported."""
    parser = argparse.ArgumentParser(prog="moe_tk", description=(moe_tk.__doc__ or "").partition("\n")[0])
    parser.add_argument("--version", action="version", version=f"moe_tk {moe_tk.__version__}")
    parsers = parser.add_subparsers(metavar="COMMAND", required=True)
    wanted = next((word for word in argv if not word.startswith("-")), None)
    for sub in subcommands:
        own = parsers.add_parser(sub.name, help=sub.summary, description=sub.summary)
        if sub.name == wanted:
            module = importlib.import_module(sub.module)
            module.add_arguments(own)
            own.set_defaults(run=module.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit status: 0 done, 1 an error of ours (one message), 2 wrong usage."""
    words = list(sys.argv[1:] if argv is None else argv)
    args = make_parser(words, available()).parse_args(words)
    try:
        return args.run(args)
    except MoETkError as error:
        print(f"moe_tk: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("moe_tk: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output went away: nothing more to say, also not at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
