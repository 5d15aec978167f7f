"""What a lap can be: names and colours of both back ends. No torch, no numpy."""

from __future__ import annotations

from dataclasses import dataclass

WORK, WAIT = "work", "wait"
TILE, BATCH = "tile", "batch"
WRITERS = 12            # of a block: stamps.cuh STAMP_WRITERS
GPU_KERNELS = ("open_call", "gather_gemm", "gemm_scatter")  # stamp_kernel
BUILD_BLOCKS = 8       # of open_call: the blocks that build the tables; the others export rows
CONSUMERS, LOADER, STORERS, LAST = (0, 4), 8, (9, 10), 11  # writers of a GEMM's block: who stamps tiles, and its last warp
CONSUMER_WARPS = 4        # of a warpgroup: where a block has only one, decode() numbers its other warps as if there were two
LOADERS = {"gather_gemm": (LOADER, LAST), "gemm_scatter": (LOADER,)}


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of lap. state: WORK or WAIT. detail: what its detail is, see details_of()."""

    name: str
    state: str = WORK
    detail: str = "item"
    colour: str = "#7c8db5"


_WAIT, _MOVE, _TABLES, _LOAD = "#e4e7ec", "#4a7ab8", "#8e7cc3", "#9fb8d9"
_MULTIPLY, _EMIT, _STORE, _SUM = "#2f9e6e", "#86b83e", "#b8a13e", "#d98c3a"
GPU_KINDS = (  # stamp_kind, in the same order
    Kind("none"), Kind("wait for launch", WAIT, colour=_WAIT),
    *(Kind(name, WAIT if name == "wait for headers" else WORK, colour=_WAIT if name == "wait for headers" else _TABLES)
      for name in ("send routing", "wait for headers", "count pairs", "place groups", "place pairs", "write tasks")),
    Kind("zero counters", colour=_TABLES), Kind("export rows", colour=_MOVE), Kind("wait for rows", WAIT, colour=_WAIT),
    Kind("load weights", WORK, TILE, _LOAD), Kind("gate", WAIT, TILE, _WAIT), Kind("load", WORK, TILE, _LOAD),
    Kind("wait for inputs", WAIT, TILE, _WAIT), Kind("multiply", WORK, TILE, _MULTIPLY), Kind("emit", WORK, TILE, _EMIT),
    Kind("skip", WORK, TILE, _WAIT),
    Kind("wait for outputs", WAIT, TILE, _WAIT), Kind("store", WORK, TILE, _STORE), Kind("push", WORK, TILE, _STORE),
    Kind("wait for jobs", WAIT, BATCH, _WAIT), Kind("combine", WORK, BATCH, _SUM),
    Kind("wait for partial rows", WAIT, BATCH, _WAIT), Kind("reduce", WORK, BATCH, "#c2544d"))

CPU_PHASES = ("dispatch", "gemm1", "gemm2", "combine", "reduce")
_CPU_COLOURS = (_MOVE, _MULTIPLY, _EMIT, _SUM, "#c2544d")
CPU_KINDS = (Kind("none"), *(Kind(phase, colour=colour) for phase, colour in zip(CPU_PHASES, _CPU_COLOURS, strict=True)),
             *(Kind(f"wait: {phase}", WAIT, colour=_WAIT) for phase in CPU_PHASES))


def kind_number(name: str) -> int:
    """Index of a kind of the GPU by its name."""
    return next(index for index, kind in enumerate(GPU_KINDS) if kind.name == name)


def details_of(kind: Kind, detail: int) -> dict[str, int]:
    """What a lap's detail says: stamp_tile() and stamp_batch() of stamps.cuh, or a phase's item."""
    if kind.detail == TILE:
        return {"row_block": detail >> 8, "col_block": detail & 0xff}
    if kind.detail == BATCH:
        return {"column_group": detail >> 20, "first": detail & 0xfffff}
    return {"item": detail}


def lane_name(kernel: str, block: int, writer: int) -> str:
    """What a writer of a GPU's kernel is."""
    if kernel == "open_call":
        return "build" if block < BUILD_BLOCKS else "export"
    if writer in CONSUMERS:
        return f"consumer {CONSUMERS.index(writer)}"
    if writer in STORERS:
        return f"storer {STORERS.index(writer)}"
    if writer in LOADERS[kernel]:
        return f"loader {LOADERS[kernel].index(writer)}" if len(LOADERS[kernel]) > 1 else "loader"
    if writer == LAST:
        return "combiner"
    return f"warp {writer}"
