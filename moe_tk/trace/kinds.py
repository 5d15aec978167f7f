"""What a lap can be: names and colours of both back ends. No torch, no numpy."""

from __future__ import annotations

from dataclasses import dataclass

WORK, WAIT, MOMENT = "work", "wait", "moment"
WRITERS = 12            # of a block: stamps.cuh STAMP_WRITERS
GPU_KERNELS = ("open_call", "gather_gemm", "gemm_scatter")  # stamp_kernel
BUILD_BLOCKS = 8        # of open_call: the blocks that build the tables; the others export rows
CONSUMERS, LOADER, STORERS, SPARE = (0, 4), 8, (9, 10), 11  # writers of a GEMM's block that stamp tiles, and the spare warp


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of lap. state: WORK, WAIT or MOMENT (no length). tile: its detail is row block << 8 | column block."""

    name: str
    state: str = WORK
    tile: bool = False
    colour: str = "#7c8db5"


_WAIT, _MOVE, _TABLES, _MULTIPLY, _EMIT, _STORE, _SUM = "#e4e7ec", "#4a7ab8", "#8e7cc3", "#2f9e6e", "#86b83e", "#b8a13e", "#d98c3a"
GPU_KINDS = (  # stamp_kind, in the same order
    Kind("none"), Kind("wait for launch", WAIT, colour=_WAIT),
    *(Kind(name, WAIT if name == "wait for headers" else WORK, colour=_WAIT if name == "wait for headers" else _TABLES)
      for name in ("zero counters", "send routing", "wait for headers", "count pairs", "place groups", "place pairs", "mark tokens",
                   "write tasks", "write orders")),
    Kind("export rows", colour=_MOVE), Kind("close", colour=_TABLES),
    Kind("gate", WAIT, True, _WAIT), Kind("load", WORK, True, "#9fb8d9"),
    Kind("wait for inputs", WAIT, True, _WAIT), Kind("multiply", WORK, True, _MULTIPLY), Kind("emit", WORK, True, _EMIT),
    Kind("skip", WORK, True, _WAIT),
    Kind("wait for outputs", WAIT, True, _WAIT), Kind("store", WORK, True, _STORE), Kind("push", WORK, True, _STORE),
    Kind("wait for source", WAIT, colour=_WAIT), Kind("move row", colour=_MOVE), Kind("row placed", MOMENT, colour=_MOVE),
    Kind("drain", colour=_MOVE),
    Kind("wait for job", WAIT, colour=_WAIT), Kind("combine", colour=_SUM), Kind("wait for partial rows", WAIT, colour=_WAIT),
    Kind("reduce", colour="#c2544d"))

CPU_PHASES = ("dispatch", "gemm1", "gemm2", "combine", "reduce")
_CPU_COLOURS = (_MOVE, _MULTIPLY, _EMIT, _SUM, "#c2544d")
CPU_KINDS = (Kind("none"), *(Kind(phase, colour=colour) for phase, colour in zip(CPU_PHASES, _CPU_COLOURS, strict=True)),
             *(Kind(f"wait: {phase}", WAIT, colour=_WAIT) for phase in CPU_PHASES))


def kind_number(name: str) -> int:
    """Index of a kind of the GPU by its name."""
    return next(index for index, kind in enumerate(GPU_KINDS) if kind.name == name)


def lane_name(kernel: str, block: int, writer: int) -> str:
    """What a writer of a GPU's kernel is."""
    if kernel == "open_call":
        return "build" if block < BUILD_BLOCKS else "export"
    if writer in CONSUMERS:
        return f"consumer {CONSUMERS.index(writer)}"
    if writer in STORERS:
        return f"storer {STORERS.index(writer)}"
    if writer == LOADER:
        return "loader"
    if writer == SPARE:
        return "mover" if kernel == "gather_gemm" else "combiner"
    return f"warp {writer}"
