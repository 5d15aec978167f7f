"""The arguments of `moe_tk trace`, checked: what is not valid is one sentence."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from moe_tk.bench.shapes import Shape, parse_shapes
from moe_tk.errors import ArgumentError

MODES = ("ep", "tp")
BACKENDS = ("auto", "cpu", "cuda")
ROUTINGS = ("uniform", "zipf", "hot_expert", "hot_rank", "balanced")
MAX_TOKENS, MAX_WORLD, MAX_BLOCKS = 65536, 32, 1024
DEFAULT_CPU_WORLD = 2
DEFAULT_SHAPE, DEFAULT_TOKENS = {"cuda": "qwen3-30b-a3b", "cpu": "256,128,16,4"}, {"cuda": "2048", "cpu": "256"}


@dataclass(frozen=True)
class Point:
    """One call that is traced."""

    shape: Shape
    tokens: int  # of each rank
    mode: str

    def __str__(self) -> str:
        return f"{self.shape.name}-{self.mode}-{self.tokens}"

    @property
    def sizes(self) -> dict[str, int]:
        """Arguments of MoELayer."""
        return {"hidden_size": self.shape.hidden, "intermediate_size": self.shape.intermediate,
                "num_experts": self.shape.experts, "top_k": self.shape.top_k}


@dataclass(frozen=True)
class Options:
    """What is traced, and where it goes. world None: a GPU per rank, or the launcher's."""

    points: tuple[Point, ...]
    backend: str = "auto"
    world: int | None = None
    routing: str = "uniform"
    seed: int = 0
    blocks: int | None = None    # in the Perfetto trace; None: all
    out: str | None = None
    picture: str | None = None
    json_path: str | None = None
    debug: bool = False


def parse_options(args: argparse.Namespace) -> Options:
    """Options of a command line whose values are still text. Raises ArgumentError, one sentence, for the first bad one."""
    points = tuple(Point(shape, _integer("--tokens", tokens, 1, MAX_TOKENS), _one_of("--mode", mode, MODES))
                   for shape in parse_shapes(args.shape) for mode in args.mode.split(",") for tokens in args.tokens.split(","))
    options = Options(
        points=points, backend=_one_of("--backend", args.backend, BACKENDS),
        world=None if args.world is None else _integer("--world", args.world, 1, MAX_WORLD),
        routing=_one_of("--routing", args.routing, ROUTINGS), seed=_integer("--seed", args.seed, 0, 2**31 - 1),
        blocks=None if args.blocks == "all" else _integer("--blocks", args.blocks, 1, MAX_BLOCKS), out=args.out,
        picture=args.picture, json_path=args.json, debug=args.debug)
    for name, path in (("--out", options.out), ("--picture", options.picture), ("--json", options.json_path)):
        if path is not None:
            _check_path(name, Path(path))
    return options


def path_of(path: str, point: Point, points: tuple[Point, ...]) -> Path:
    """Where the file of a point goes: `path`, with the point in its name where there are several."""
    given = Path(path)
    if len(points) == 1:
        return given
    suffixes = "".join(given.suffixes)
    return given.with_name(f"{given.name.removesuffix(suffixes)}-{point}{suffixes}")


def _one_of(name: str, value: str, valid: tuple[str, ...]) -> str:
    if value not in valid:
        raise ArgumentError(f"{name} is {value!r}, wanted one of {', '.join(valid)}")
    return value


def _integer(name: str, text: str, least: int, most: int) -> int:
    try:
        value = int(text)
    except ValueError:
        raise ArgumentError(f"{name} is {text!r}, wanted an integer from {least} to {most}") from None
    if not least <= value <= most:
        raise ArgumentError(f"{name} is {value}, wanted an integer from {least} to {most}")
    return value


def _check_path(name: str, path: Path) -> None:
    """Before any work: a result that cannot be written is found out at the start."""
    if path.is_dir():
        raise ArgumentError(f"{name} {path}: is a folder, wanted a file")
    if not path.absolute().parent.is_dir():
        raise ArgumentError(f"{name} {path}: the folder {path.absolute().parent} does not exist")
