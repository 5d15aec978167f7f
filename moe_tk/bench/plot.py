"""The times over T as one SVG: a panel for each shape, mode, dtype and routing; both axes logarithmic. No dependencies."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from itertools import groupby
from typing import Any

from moe_tk.bench.report import title_of
from moe_tk.bench.run import time_of

WIDTH, HEIGHT, COLUMNS = 420, 300, 2         # of a panel; panels in a row
LEFT, RIGHT, TOP, BOTTOM = 56, 22, 30, 40    # of the axes in it
LEGEND = 34
FONT = "Helvetica, Arial, sans-serif"
OURS, RIVALS = ("#c1121f", "#7b2cbf", "#e07a00", "#0a6847"), ("#1d5fa8", "#2a9d8f", "#6b705c", "#8d5524")
FLOOR = "#999999"
Series = dict[str, list[tuple[float, float]]]


def picture(lines: Sequence[dict[str, Any]]) -> str:
    """The SVG of all lines that have times."""
    good = [line for line in lines if "floor" in line and line["tokens"] > 0]
    panels = [(title, series_of(list(group))) for title, group in groupby(good, key=title_of)]
    colours = colours_of(good)
    rows = max(1, math.ceil(len(panels) / COLUMNS))
    width, height = WIDTH * min(COLUMNS, max(1, len(panels))), rows * HEIGHT + LEGEND
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="{FONT}" font-size="11">',
           f'<rect width="{width}" height="{height}" fill="#ffffff"/>', legend(colours)]
    for index, (title, series) in enumerate(panels):
        x, y = index % COLUMNS * WIDTH, LEGEND + index // COLUMNS * HEIGHT
        out += [f'<g transform="translate({x},{y})">', *panel(title, series, colours), "</g>"]
    return "\n".join([*out, "</svg>"]) + "\n"


def series_of(lines: list[dict[str, Any]]) -> Series:
    """(T, us) of the floor and of every contender that has times."""
    series: Series = {"floor": [(line["tokens"], line["floor"]["us"]) for line in lines if line["floor"]["us"] > 0]}
    for line in lines:
        for contender in line["contenders"]:
            us = time_of(contender)
            if us is not None and us > 0:
                series.setdefault(contender["name"], []).append((line["tokens"], us))
    return {name: sorted(points) for name, points in series.items()}


def colours_of(lines: Sequence[dict[str, Any]]) -> dict[str, str]:
    """Of the floor and of each contender; ours are warm."""
    found, left = {"floor": FLOOR}, {True: list(OURS), False: list(RIVALS)}
    for line in lines:
        for contender in line["contenders"]:
            if contender["name"] not in found and time_of(contender) is not None:
                mine = left[contender["ours"]]
                found[contender["name"]] = mine.pop(0) if mine else "#000000"
    return found


def legend(colours: dict[str, str]) -> str:
    parts, x = [], LEFT
    for name, colour in colours.items():
        parts.append(f'<line x1="{x}" y1="17" x2="{x + 22}" y2="17" stroke="{colour}" stroke-width="2"{dashes(name)}/>'
                     f'<text x="{x + 28}" y="21">{escape(name)}</text>')
        x += 44 + 7 * len(name)
    return "".join(parts)


def dashes(name: str) -> str:
    return ' stroke-dasharray="5 4"' if name == "floor" else ""


def panel(title: str, series: Series, colours: dict[str, str]) -> list[str]:
    """Axes, lines and points of one panel at the origin."""
    xs = sorted({x for points in series.values() for x, _ in points})
    ys = [y for points in series.values() for _, y in points]
    if not xs or not ys:
        return []
    across = axis(min(xs), max(xs), LEFT, WIDTH - RIGHT)
    up = axis(min(ys) / 1.3, max(ys) * 1.3, HEIGHT - BOTTOM, TOP)
    out = [f'<text x="{LEFT}" y="20" font-weight="bold">{escape(title)}</text>']
    for tick in ticks(min(ys), max(ys)):
        y = up(tick)
        if TOP <= y <= HEIGHT - BOTTOM:
            out.append(f'<line x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}" stroke="#e4e4e4"/>'
                       f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>')
    for x in xs:
        out.append(f'<text x="{across(x):.1f}" y="{HEIGHT - BOTTOM + 15}" text-anchor="middle">{x:g}</text>')
    out.append(f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 8}" text-anchor="middle">tokens per rank</text>'
               f'<text x="14" y="{(TOP + HEIGHT - BOTTOM) / 2}" text-anchor="middle" '
               f'transform="rotate(-90 14 {(TOP + HEIGHT - BOTTOM) / 2})">us of a call</text>')
    for name, points in series.items():
        path = " ".join(f"{across(x):.1f},{up(y):.1f}" for x, y in points)
        out.append(f'<polyline points="{path}" fill="none" stroke="{colours[name]}" stroke-width="2"{dashes(name)}/>')
        if name != "floor":
            out += [f'<circle cx="{across(x):.1f}" cy="{up(y):.1f}" r="2.8" fill="{colours[name]}"/>' for x, y in points]
    return out


def axis(low: float, high: float, first: float, last: float) -> Any:
    """value -> pixel, logarithmic; a single value is in the middle."""
    span = math.log(high) - math.log(low)

    def place(value: float) -> float:
        return (first + last) / 2 if span == 0 else first + (last - first) * (math.log(value) - math.log(low)) / span

    return place


def ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 of each power of ten around the values."""
    powers = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 1)
    return [factor * 10.0**power for power in powers for factor in (1, 2, 5)]
