"""The arguments of the demo, checked: what is not valid is one sentence."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from moe_tk.errors import ArgumentError

MODES = ("ep", "tp")
PATTERNS = ("serial", "two_kernel", "mega")
MAX_WORLD = 8
MAX_TOKENS = 4096  # rows of the input that ships
MAX_CALLS = 1000
DEFAULT_WORLD = 4
DEFAULT_CALLS, MIN_CALLS = 7, 3
TIMED_LIMIT_S = 10.0


@dataclass(frozen=True)
class Options:
    """world is None where the launcher decides (torchrun) or the default holds."""

    world: int | None = None
    modes: tuple[str, ...] = MODES
    patterns: tuple[str, ...] = PATTERNS
    tokens: int = MAX_TOKENS
    uneven: bool = False
    calls: int = DEFAULT_CALLS
    timed_limit_s: float | None = TIMED_LIMIT_S  # of one mode: once over, MIN_CALLS are enough; None: no limit
    json_path: str | None = None
    debug: bool = False


def parse_options(args: argparse.Namespace) -> Options:
    """Options of a command line whose values are still text. Raises ArgumentError, one sentence, for the first bad one."""
    _check_backend(args.backend)
    options = Options(
        world=None if args.world is None else _integer("--world", args.world, 1, MAX_WORLD),
        modes=MODES if args.mode == "both" else (_one_of("--mode", args.mode, (*MODES, "both")),),
        patterns=_patterns(args.pattern), tokens=_integer("--tokens", args.tokens, 1, MAX_TOKENS), uneven=args.uneven,
        calls=DEFAULT_CALLS if args.calls is None else _integer("--calls", args.calls, 1, MAX_CALLS),
        timed_limit_s=TIMED_LIMIT_S if args.calls is None else None, json_path=args.json, debug=args.debug)
    if options.json_path is not None:
        _check_json_path(Path(options.json_path))
    return options


def _check_backend(name: str) -> None:
    if name == "cuda":
        raise ArgumentError("--backend cuda: this version of moe_tk has no CUDA backend yet; run the same layer on the CPU "
                            "with --backend cpu (or auto)")
    _one_of("--backend", name, ("auto", "cpu"))


def _one_of(name: str, value: str, valid: tuple[str, ...]) -> str:
    if value not in valid:
        raise ArgumentError(f"{name} is {value!r}, wanted one of {', '.join(valid)}")
    return value


def _patterns(text: str) -> tuple[str, ...]:
    if text == "all":
        return PATTERNS
    wanted = [_one_of("--pattern", word.strip(), PATTERNS) for word in text.split(",")]
    return tuple(pattern for pattern in PATTERNS if pattern in wanted)


def _integer(name: str, text: str, least: int, most: int) -> int:
    try:
        value = int(text)
    except ValueError:
        raise ArgumentError(f"{name} is {text!r}, wanted an integer from {least} to {most}") from None
    if not least <= value <= most:
        raise ArgumentError(f"{name} is {value}, wanted an integer from {least} to {most}")
    return value


def _check_json_path(path: Path) -> None:
    """Before any work: a result that cannot be written is found out at the start."""
    if path.is_dir():
        raise ArgumentError(f"--json {path}: is a folder, wanted a file")
    if not path.absolute().parent.is_dir():
        raise ArgumentError(f"--json {path}: the folder {path.absolute().parent} does not exist")
