"""What `moe_tk bench layer` was asked for, parsed and checked."""

from __future__ import annotations

import argparse
import importlib.util
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from moe_tk.bench.floor import MachineNumbers, wire_rate
from moe_tk.bench.rivals import NAMES as RIVALS
from moe_tk.bench.routings import check_routing
from moe_tk.bench.shapes import SHAPES, Shape, parse_shapes
from moe_tk.errors import ArgumentError
from moe_tk.sizes import check_count, check_positive

BACKENDS = ("auto", "cuda", "cpu")
PATTERNS = {"cuda": ("two_kernel", "serial", "auto", "mega"), "cpu": ("two_kernel", "serial", "mega", "auto")}
BASELINES = ("serial",)  # patterns of ours that --against may name
DEFAULT_PATTERNS = {"cuda": "two_kernel,serial,auto", "cpu": "two_kernel,serial"}
DEFAULT_TOKENS = {"cuda": "64,512,2048,8192", "cpu": "64"}
DEFAULT_SHAPES = {"cuda": ",".join(SHAPES), "cpu": "256,128,8,2"}
DTYPES = ("bf16", "e4m3")
SWEEPS = ("comm-sms",)
MAX_CPU_WORLD = 8


@dataclass(frozen=True)
class Options:
    """One run. Tokens are per rank; `world` None: as many ranks as there are GPUs, or as torchrun has started."""

    shapes: tuple[Shape, ...]
    tokens: tuple[int, ...]
    modes: tuple[str, ...]
    dtypes: tuple[str, ...]
    routings: tuple[str, ...]
    patterns: tuple[str, ...]
    against: tuple[str, ...]   # rivals and BASELINES; no name is in both
    backend: str               # "cuda" | "cpu"
    world: int | None
    rounds: int
    calls: int | None          # of one sample; None: by the number of tokens
    pause_ms: float
    sustained_s: float         # 0: burst only
    eager: bool
    flush_l2: bool
    attribute: bool
    sweep: str | None
    numbers: MachineNumbers
    seed: int
    json_path: Path | None
    plot_path: Path | None
    limit_s: float
    debug: bool

    @property
    def total_lines(self) -> int:
        """Lines of the table."""
        return len(self.shapes) * len(self.modes) * len(self.dtypes) * len(self.routings) * len(self.tokens)

    def calls_per_sample(self, tokens: int) -> int:
        """Calls that are timed together: more where they are short. One with --flush-l2, which flushes before each."""
        if self.flush_l2:
            return 1
        return self.calls or (8 if tokens <= 512 else 4 if tokens <= 2048 else 2)


def parse_options(args: argparse.Namespace) -> Options:
    """Raises ArgumentError, one sentence, at the first argument that cannot be."""
    backend = _backend(args.backend)
    patterns, against = _contenders(args, backend)
    options = Options(
        shapes=tuple(shape for text in args.shape or [DEFAULT_SHAPES[backend]] for shape in parse_shapes(text)),
        tokens=tuple(_integers("--tokens", args.tokens or DEFAULT_TOKENS[backend])),
        modes=("ep", "tp") if args.mode == "both" else (_one_of("--mode", args.mode, ("ep", "tp", "both")),),
        dtypes=tuple(_words("--dtype", args.dtype, DTYPES)),
        routings=tuple(check_routing(spec) for spec in args.routing or ["uniform"]),
        patterns=patterns, against=against, backend=backend,
        world=None if args.world is None else check_count("--world", _integer("--world", args.world)),
        rounds=check_count("--rounds", _integer("--rounds", args.rounds)),
        calls=None if args.calls is None else check_count("--calls", _integer("--calls", args.calls)),
        pause_ms=_number("--pause-ms", args.pause_ms, least=0.0), eager=args.eager, flush_l2=args.flush_l2,
        sustained_s=0.0 if args.sustained is None else _number("--sustained", args.sustained, least=0.0),
        attribute=args.attribute, sweep=None if args.sweep is None else _one_of("--sweep", args.sweep, SWEEPS),
        numbers=_numbers(args), seed=_integer("--seed", args.seed), json_path=_path("--json", args.json),
        plot_path=_path("--plot", args.plot), limit_s=check_positive("--limit-s", _number("--limit-s", args.limit_s), "seconds"),
        debug=args.debug)
    if backend == "cpu":
        _check_cpu(options)
    return options


def _contenders(args: argparse.Namespace, backend: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(patterns of ours, what they are compared with): a pattern that --against names is there only, so that nobody runs twice."""
    against = () if args.against in ("", "none") else tuple(_words("--against", args.against, (*BASELINES, *RIVALS)))
    asked = args.pattern or DEFAULT_PATTERNS[backend]
    patterns = tuple(pattern for pattern in _words("--pattern", asked, PATTERNS[backend]) if pattern not in against)
    if not patterns:
        raise ArgumentError(f"--pattern {asked} and --against {args.against} leave nothing to compare: name another pattern")
    return patterns, against


def _check_cpu(options: Options) -> None:
    for asked, name in ((options.attribute, "--attribute"), (options.sweep, "--sweep"), (options.flush_l2, "--flush-l2")):
        if asked:
            raise ArgumentError(f"{name} looks into the CUDA back end: not possible with --backend cpu")
    check_count("--world", options.world or 2, most=MAX_CPU_WORLD)


def _backend(name: str) -> str:
    _one_of("--backend", name, BACKENDS)
    if name != "auto":
        return name
    if importlib.util.find_spec("torch") is not None:
        import torch

        if torch.cuda.is_available():
            return "cuda"
    raise ArgumentError("torch sees no GPU: the layer on the CPU back end is measured with --backend cpu (tiny shapes; says "
                        "nothing about GPUs)")


def _numbers(args: argparse.Namespace) -> MachineNumbers:
    given = {"hbm_tbs": args.hbm_tbs, "bf16_tflops": args.bf16_tflops, "fp8_tflops": args.fp8_tflops, "wire_gbs": args.wire_gbs}
    numbers = MachineNumbers()
    if args.doctor is not None and args.wire_gbs is None:
        numbers = replace(numbers, wire_gbs=wire_rate(Path(args.doctor)))
    return replace(numbers, **{name: check_positive(f"--{name.replace('_', '-')}", _number(name, text))
                               for name, text in given.items() if text is not None})


def _path(name: str, text: str | None) -> Path | None:
    """A file that can be made: known before hours of measuring."""
    if text is None:
        return None
    path = Path(text)
    if not path.parent.is_dir() or path.is_dir():
        raise ArgumentError(f"{name} {text}: {'it is a folder' if path.is_dir() else f'there is no folder {path.parent}'}")
    return path


def _words(name: str, text: str, valid: Any) -> list[str]:
    return list(dict.fromkeys(_one_of(name, word.strip(), tuple(valid)) for word in text.split(",")))


def _one_of(name: str, word: str, valid: tuple[str, ...]) -> str:
    if word not in valid:
        raise ArgumentError(f"{name} is {word!r}, wanted one of {', '.join(valid)}")
    return word


def _integers(name: str, text: str) -> list[int]:
    return [check_count(name, _integer(name, word)) for word in text.split(",")]


def _integer(name: str, text: Any) -> int:
    try:
        return int(text)
    except ValueError:
        raise ArgumentError(f"{name} is {text!r}, wanted an integer") from None


def _number(name: str, text: Any, least: float = float("-inf")) -> float:
    try:
        value = float(text)
    except ValueError:
        raise ArgumentError(f"{name} is {text!r}, wanted a number") from None
    if not least <= value < float("inf"):
        raise ArgumentError(f"{name} is {text}, wanted a number >= {least:g}")
    return value
