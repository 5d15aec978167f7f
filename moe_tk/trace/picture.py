"""A trace as an SVG picture: per rank, how busy all its roles are over time, and what a few of its blocks do."""

from __future__ import annotations

from dataclasses import dataclass
from xml.sax.saxutils import escape

import numpy as np

from moe_tk.trace.kinds import CONSUMERS, LAST, LOADER, WAIT, WRITERS, Kind, kind_number
from moe_tk.trace.model import Laps, RankTrace, Trace
from moe_tk.trace.perfetto import kinds_of, shown_blocks
from moe_tk.trace.summary import consumers_of

LEFT, RIGHT, TOP, WIDTH = 150, 20, 64, 860  # of the time axis, in pixels
LANE, GAP, CURVE = 11, 3, 40
TEXT, FAINT = "#1d2430", "#5b6472"
SHOWN_BLOCKS = 3
LEAST_COVER = 0.02  # of a pixel: less is not shown
GPU_LANES = ((LOADER, "loader"), (CONSUMERS[0], "consumer"), (LAST, "last warp"))


@dataclass(frozen=True)
class Layer:
    """Lanes in one of `kinds`; only those of some writers, if given."""

    kinds: tuple[int, ...]
    colour: str
    writers: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Curve:
    """Shares of `lanes` lanes over time, one layer on the other."""

    title: str
    lanes: int
    layers: tuple[Layer, ...]
    note: str = ""


def draw(trace: Trace) -> str:
    """The SVG text."""
    begin, end = trace.begin_ns, trace.end_ns
    parts: list[str] = []
    y = TOP
    for rank in trace.ranks:
        y = _draw_rank(parts, trace, rank, begin, end, y)
    height = y + 58
    head = (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + WIDTH + RIGHT} {height}" width="{LEFT + WIDTH + RIGHT}" '
            f'height="{height}" font-family="Helvetica, Arial, sans-serif">\n<rect width="100%" height="100%" fill="#ffffff"/>\n')
    return head + "\n".join([*_title(trace), *parts, *_axis(begin, end, y), *_legend(trace, y + 30)]) + "\n</svg>\n"


def _text(x: float, y: float, text: str, *, size: int = 11, fill: str = FAINT, anchor: str = "start",
          weight: str = "normal") -> str:
    return (f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{fill}" text-anchor="{anchor}" font-weight="{weight}">'
            f"{escape(text)}</text>")


def _title(trace: Trace) -> list[str]:
    call = trace.call
    title = f"{call['shape']}, {call['mode'].upper()}, {call['tokens_per_rank']} tokens on each of {call['world']} ranks"
    span = (trace.end_ns - trace.begin_ns) / 1e3
    where = call.get("gpu", "CPU back end")
    return [_text(20, 26, title, size=15, fill=TEXT, weight="bold"),
            _text(20, 45, f"{where}; one call of {span:.0f} us, recorded inside the kernels: how many of a rank's roles are at "
                          f"work, and what {SHOWN_BLOCKS} of its blocks do", size=12)]


def _draw_rank(parts: list[str], trace: Trace, rank: RankTrace, begin: float, end: float, y: int) -> int:
    """Adds a rank's curves and lanes from `y` on; returns where the next rank begins."""
    shift, laps, kinds = trace.shift(rank) - begin, rank.laps, kinds_of(rank.backend)
    parts.append(_text(20, y + 12, f"rank {rank.rank}", size=13, fill=TEXT, weight="bold"))
    top, y = y, y + 20
    for curve in _curves(rank):
        parts += _areas(curve, laps, shift, end - begin, y)
        parts += [_text(LEFT - 8, y + CURVE - 14, curve.title, anchor="end"),
                  _text(LEFT - 8, y + CURVE - 2, f"of {curve.lanes}{curve.note}", size=9, anchor="end")]
        y += CURVE + 6
    for block in sorted(shown_blocks(rank, SHOWN_BLOCKS)):
        y += 4
        for writer, name in GPU_LANES if rank.backend == "cuda" else ((0, "all"),):
            mine = laps.where((laps.block == block) & (laps.writer == writer))
            parts += _lane(mine, kinds, shift, end - begin, y)
            parts.append(_text(LEFT - 8, y + LANE - 2, f"block {block} {name}", size=10, anchor="end"))
            y += LANE + GAP
    parts += _boundaries(rank, shift, end - begin, top, y)
    return y + 12


def _curves(rank: RankTrace) -> list[Curve]:
    if rank.backend != "cuda":
        blocks = len(np.unique(rank.laps.block))
        return [Curve(kind.name, blocks, (Layer((index,), kind.colour),)) for index, kind in enumerate(kinds_of("cpu"))
                if kind.state != WAIT and (rank.laps.kind == index).any()]
    blocks = int(rank.laps.block.max()) + 1 if len(rank.laps) else 1

    def layer(colour: str, *names: str, writers: tuple[int, ...] | None = None) -> Layer:
        return Layer(tuple(kind_number(name) for name in names), colour, writers)

    consumers = max(1, consumers_of(rank.laps))
    return [Curve("blocks that send rows", blocks, (layer("#4a7ab8", "export rows"),), _waited(rank.laps)),
            Curve("loaders at the gate", blocks, (layer("#a3acbb", "gate", writers=(LOADER,)),)),
            Curve("consumers at work", consumers * blocks, (layer("#2f9e6e", "multiply", "emit", writers=CONSUMERS),)),
            Curve("warps that add rows", WRITERS * blocks, (layer("#d98c3a", "combine", "reduce"),))]


def _waited(laps: Laps) -> str:
    """How long open_call waited for the rows of other ranks: one block, too little for a curve."""
    mine = laps.where(laps.kind == kind_number("wait for rows"))
    return f"; one waits {(mine.end - mine.begin).sum() / 1e3:.1f} us" if len(mine) else ""


def _shares(laps: Laps, layer: Layer, shift: float, length: float, lanes: int, bins: int) -> np.ndarray:
    """[bins] share of `lanes` that are in this layer."""
    chosen = np.isin(laps.kind, layer.kinds)
    if layer.writers is not None:
        chosen &= np.isin(laps.writer, layer.writers)
    mine, scale = laps.where(chosen), bins / max(length, 1.0)
    return np.minimum(1.0, _cover((mine.begin + shift) * scale, (mine.end + shift) * scale, bins) / max(1, lanes))


def _cover(first: np.ndarray, last: np.ndarray, bins: int) -> np.ndarray:
    """[bins] how much of each unit bin the spans cover, added up."""
    edges = np.arange(bins + 1)
    first, last = np.sort(np.clip(first, 0, bins)), np.sort(np.clip(last, 0, bins))

    def below(points: np.ndarray) -> np.ndarray:
        """Sum over points of max(0, edge - point)."""
        before = np.searchsorted(points, edges)
        sums = np.concatenate([[0.0], np.cumsum(points)])
        return before * edges - sums[before]

    return np.diff(below(first) - below(last))


def _areas(curve: Curve, laps: Laps, shift: float, length: float, y: int) -> list[str]:
    """The curve in its frame: the upper layers first, each down to the bottom, so that the lower ones cover them."""
    parts = [f'<rect x="{LEFT}" y="{y}" width="{WIDTH}" height="{CURVE}" fill="#f6f7f9"/>']
    shares = [_shares(laps, layer, shift, length, curve.lanes, WIDTH // 2) for layer in curve.layers]
    for layer, height in reversed(list(zip(curve.layers, np.minimum(1.0, np.cumsum(shares, axis=0)), strict=True))):
        points = " ".join(f"{LEFT + 2 * i + 1},{y + CURVE - share * CURVE:.1f}" for i, share in enumerate(height))
        parts.append(f'<polygon points="{LEFT},{y + CURVE} {points} {LEFT + WIDTH},{y + CURVE}" fill="{layer.colour}"/>')
    return parts


def _lane(laps: Laps, kinds: tuple[Kind, ...], shift: float, length: float, y: int) -> list[str]:
    """One writer: in each pixel the kind that fills most of it, runs of one kind as one box."""
    best, chosen = np.full(WIDTH, LEAST_COVER), np.zeros(WIDTH, dtype=int)
    scale = WIDTH / max(length, 1.0)
    for kind in np.unique(laps.kind).tolist():
        mine = laps.where(laps.kind == kind)
        cover = _cover((mine.begin + shift) * scale, (mine.end + shift) * scale, WIDTH)
        better = cover > best
        best[better], chosen[better] = cover[better], kind
    edges = np.flatnonzero(np.diff(chosen)) + 1
    boxes = []
    for first, last in zip([0, *edges.tolist()], [*edges.tolist(), WIDTH], strict=True):
        kind = kinds[chosen[first]]
        if chosen[first]:
            boxes.append(f'<rect x="{LEFT + first}" y="{y}" width="{last - first}" height="{LANE}" fill="{kind.colour}">'
                         f"<title>{escape(kind.name)}</title></rect>")
    return boxes


def _boundaries(rank: RankTrace, shift: float, length: float, top: int, bottom: int) -> list[str]:
    """Where each kernel's first block begins."""
    lines = []
    for index, name in enumerate(rank.kernels):
        began = rank.blocks_begun[rank.blocks_begun[:, 0] == index, 2]
        if len(began):
            x = LEFT + (began.min() + shift) / max(length, 1.0) * WIDTH
            lines += [f'<line x1="{x:.1f}" y1="{top + 4}" x2="{x:.1f}" y2="{bottom}" stroke="{TEXT}" stroke-dasharray="3 3"/>',
                      _text(x + 4, top + 13, name, size=10, fill=TEXT)]
    return lines


def _axis(begin: float, end: float, y: int) -> list[str]:
    length = (end - begin) / 1e3
    step = next(digit * 10**power for power in range(9) for digit in (1, 2, 5) if length / (digit * 10**power) <= 10)
    marks = [f'<line x1="{LEFT}" y1="{y}" x2="{LEFT + WIDTH}" y2="{y}" stroke="{FAINT}"/>']
    for us in range(0, int(length) + 1, step):
        x = LEFT + us / length * WIDTH
        marks += [f'<line x1="{x:.1f}" y1="{y}" x2="{x:.1f}" y2="{y + 4}" stroke="{FAINT}"/>',
                  _text(x, y + 16, f"{us} us" if us == 0 else str(us), size=10, anchor="middle")]
    return marks


def _legend(trace: Trace, y: int) -> list[str]:
    backend = trace.ranks[0].backend
    if backend == "cuda":
        names = ("place pairs", "load", "multiply", "emit", "export rows", "combine", "reduce", "gate")
        kinds = [next(kind for kind in kinds_of(backend) if kind.name == name) for name in names]
        labels = ["tables", "load", "multiply", "emit", "send rows", "combine", "reduce", "wait"]
    else:
        kinds = [kind for kind in kinds_of(backend)[1:] if kind.state != WAIT]
        labels = [kind.name for kind in kinds]
    parts, x = [], LEFT
    for kind, label in zip(kinds, labels, strict=True):
        parts += [f'<rect x="{x}" y="{y}" width="12" height="12" fill="{kind.colour}"/>', _text(x + 16, y + 10, label)]
        x += 28 + 7 * len(label) + 12
    return parts
