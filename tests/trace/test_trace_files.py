"""The Perfetto trace and the picture of a made-up call."""

from __future__ import annotations

import gzip
import io
import json
import xml.etree.ElementTree as ElementTree
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from made_up import TOKENS, make_call, make_tables
from rich.console import Console

from moe_tk.trace import perfetto, picture
from moe_tk.trace.decode import decode
from moe_tk.trace.kinds import BUILD_BLOCKS, CONSUMERS, LAST, LOADER, kind_number, lane_name
from moe_tk.trace.model import Trace
from moe_tk.trace.show import show
from moe_tk.trace.summary import GATHER, summarise

CALL = {"shape": "small", "mode": "ep", "tokens_per_rank": TOKENS, "world": 2, "traced_call_us": 100.0, "gpu": "made <up>"}
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def trace() -> Trace:
    first = decode(*make_call(make_tables()).stamps(), rank=0, call=CALL)
    second = replace(first, rank=1, origin_ns=first.origin_ns + 10**9 + 5_000, offset_ns=-1e9)
    return Trace((first, second), CALL)


def check_schema(events: list[dict]) -> None:
    """What the trace event format asks for, and what would make a thread's events overlap."""
    ends: dict[tuple[int, int], float] = {}
    named = set()
    for event in events:
        assert event["ph"] in "XM" and isinstance(event["pid"], int) and isinstance(event["tid"], int)
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "thread_name", "thread_sort_index")
            named.add((event["pid"], event["tid"]))
            continue
        thread = event["pid"], event["tid"]
        assert thread in named and event["ts"] >= 0 and event["cat"] in ("work", "wait")
        assert event["dur"] >= 0 and event["ts"] >= ends.get(thread, 0.0) - 2e-3  # rounded to ns
        ends[thread] = event["ts"] + event["dur"]


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_perfetto_trace_is_valid_and_whole(trace, tmp_path, name):
    path = tmp_path / name
    perfetto.write(trace, path)
    text = (gzip.open(path, "rt") if name.endswith("gz") else path.open()).read()
    content = json.loads(text)
    events = content["traceEvents"]
    check_schema(events)
    assert content["displayTimeUnit"] == "ns" and content["otherData"]["shape"] == "small"
    assert sum(event["ph"] != "M" for event in events) == sum(len(rank.laps) for rank in trace.ranks)
    names = {(event["pid"], event["tid"]): event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert len(set(names.values())) == len(names) / 2 and "gather_gemm 003 loader 1" in names.values()
    gates = [event for event in events if event["name"] == "gate"]
    assert gates and all(set(event["args"]) == {"row_block", "col_block"} for event in gates)
    first = {rank: min(event["ts"] for event in events if event["ph"] == "X" and event["pid"] == rank) for rank in (0, 1)}
    assert first == {0: 0.0, 1: 5.0}


def test_a_choice_of_blocks(trace):
    """--blocks 4: four blocks of each rank, spread over all."""
    whole, some = (list(perfetto.events(trace, blocks)) for blocks in (None, 4))
    check_schema(some)
    assert perfetto.shown_blocks(trace.ranks[0], 4) == {0, 4, 9, 13}
    assert perfetto.shown_blocks(trace.ranks[0], 999) == set(range(18))
    assert 0 < len(some) < len(whole) / 3


def test_lanes_have_the_names_of_their_roles():
    assert Counter(lane_name("open_call", block, 0) for block in range(132)) == {
        "build": BUILD_BLOCKS, "export": 132 - BUILD_BLOCKS}
    assert [lane_name("gather_gemm", 5, writer) for writer in (*CONSUMERS, LOADER, LAST, 3)] == [
        "consumer 0", "consumer 1", "loader 0", "loader 1", "warp 3"]
    assert [lane_name("gemm_scatter", 5, writer) for writer in (LOADER, LAST)] == ["loader", "combiner"]


def test_tables_say_how_long_open_call_waited_for_rows_and_when_the_first_tile_began_behind_it(trace):
    console = Console(width=140, file=io.StringIO())
    show(summarise(trace), console)
    lines = [" ".join(line.split()) for line in console.file.getvalue().splitlines()]
    for wanted in ("wait for rows 3.1 8.2", "wait for rows 3.1 13.2", "... after the end of open_call 7.1"):
        assert wanted in lines, wanted
    assert [line for line in lines if "gate" in line] == ["loaders at the gate 2 %"] * 2  # of GEMM 2 only


def test_picture_is_an_svg_with_all_ranks_lanes_and_kernels(trace):
    root = ElementTree.fromstring(picture.draw(trace))
    texts = [node.text for node in root.iter(f"{SVG}text")]
    assert texts.count("of 18; one waits 3.1 us") == 2 and texts.count("loaders at the gate") == 2
    assert texts[0] == "small, EP, 40 tokens on each of 2 ranks" and texts[1].startswith("made <up>; one call of ")
    for wanted in ("rank 0", "rank 1", "gather_gemm", "gemm_scatter", "block 0 loader", "block 6 consumer", "block 12 last warp"):
        assert wanted in texts, wanted
    width, height = (float(root.get(name)) for name in ("width", "height"))
    for box in root.iter(f"{SVG}rect"):
        if not box.get("width").endswith("%"):
            assert 0 <= float(box.get("x")) <= float(box.get("x")) + float(box.get("width")) <= width
            assert 0 <= float(box.get("y")) <= height - float(box.get("height"))
    assert {node.text for node in root.iter(f"{SVG}title")} >= {"multiply", "gate", "load", "export rows", "combine", "reduce"}


def test_curve_is_the_share_of_the_lanes(trace):
    """The curves' integral is the time that the lanes were in that kind."""
    laps = trace.ranks[0].laps
    layer = picture.Layer((kind_number("multiply"),), "#000", CONSUMERS)
    length = float(laps.end.max())
    shares = picture._shares(laps, layer, 0.0, length, 36, 430)
    mine = (laps.kind == kind_number("multiply")) & np.isin(laps.writer, CONSUMERS)
    assert shares.sum() * length / 430 * 36 == pytest.approx((laps.end - laps.begin)[mine].sum(), rel=1e-6)
    assert shares.min() >= 0 and shares.max() <= 1


def test_a_pixel_shows_what_fills_most_of_it(trace):
    lane = trace.ranks[0].laps.where((trace.ranks[0].laps.block == 0) & (trace.ranks[0].laps.writer == LOADER)
                                     & (trace.ranks[0].laps.kernel == GATHER))
    boxes = picture._lane(lane, perfetto.kinds_of("cuda"), -float(lane.begin.min()), float(lane.end.max() - lane.begin.min()), 0)
    kinds = [ElementTree.fromstring(box).find("title").text for box in boxes]
    assert kinds == ["wait for launch", "load weights", "load", "load"]  # two tiles
