"""The arguments of the demo, checked: what is not valid is one sentence."""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from pathlib import Path

from moe_tk.demo.gpus import cuda_patterns, find_gpus
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
    backend: str = "cpu"                # "cpu" | "cuda"
    devices: tuple[int, ...] = ()       # GPUs that ranks may take, on the CUDA back end


def default_world(options: Options) -> int:
    """Ranks of a run that names no number: a GPU each, or DEFAULT_WORLD of the CPU."""
    return min(MAX_WORLD, len(options.devices)) if options.backend == "cuda" else DEFAULT_WORLD


def parse_options(args: argparse.Namespace) -> Options:
    """Options of a command line whose values are still text. Raises ArgumentError, one sentence, for the first bad one."""
    world = None if args.world is None else _integer("--world", args.world, 1, MAX_WORLD)
    wanted = None if args.pattern == "all" else _patterns(args.pattern)
    backend, devices = _backend(args.backend, world, wanted)
    options = Options(
        world=world, backend=backend, devices=devices,
        modes=MODES if args.mode == "both" else (_one_of("--mode", args.mode, (*MODES, "both")),),
        patterns=wanted or _available(backend), tokens=_integer("--tokens", args.tokens, 1, MAX_TOKENS), uneven=args.uneven,
        calls=DEFAULT_CALLS if args.calls is None else _integer("--calls", args.calls, 1, MAX_CALLS),
        timed_limit_s=TIMED_LIMIT_S if args.calls is None else None, json_path=args.json, debug=args.debug)
    if options.json_path is not None:
        _check_json_path(Path(options.json_path))
    return options


def _backend(name: str, world: int | None, patterns: tuple[str, ...] | None) -> tuple[str, tuple[int, ...]]:
    """(back end, GPUs). "auto" takes the GPUs where they can do all that was asked for by name."""
    _one_of("--backend", name, ("auto", "cpu", "cuda"))
    if name == "cpu":
        return "cpu", ()
    gpus = find_gpus()
    lacking = [] if patterns is None or not gpus.number else [one for one in patterns if one not in _available("cuda")]
    why = ""
    if not gpus.number:
        why = gpus.why_none
    elif (ranks := world or int(os.environ.get("LOCAL_WORLD_SIZE", "1"))) > gpus.number:
        why = f"{ranks} ranks, but {gpus.number} GPU{'s' * (gpus.number > 1)} can work together here"
    elif lacking:
        why = f"--pattern {','.join(lacking)}: GPUs have {', '.join(_available('cuda'))}"
    if not why:
        return "cuda", gpus.indices
    if name == "cuda":
        raise ArgumentError(f"--backend cuda: {why}; run the same layer on the CPU with --backend cpu (or auto)")
    return "cpu", ()


def _available(backend: str) -> tuple[str, ...]:
    return PATTERNS if backend == "cpu" else cuda_patterns()


def _one_of(name: str, value: str, valid: tuple[str, ...]) -> str:
    if value not in valid:
        raise ArgumentError(f"{name} is {value!r}, wanted one of {', '.join(valid)}")
    return value


def _patterns(text: str) -> tuple[str, ...]:
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
