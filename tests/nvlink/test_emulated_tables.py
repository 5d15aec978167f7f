"""open_call's tables on the emulated machine, and that what is left out of kernels there is seen."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import emulated
import pytest
from emulated_runs import SIZES, run_calls, run_tables, sizes


def draw_table_sizes(draw: random.Random) -> dict:
    """Anything that a workspace takes, small in all at once."""
    world, top_k = draw.choice((1, 2, 2, 3, 8, 1, 2, 32)), draw.choice((1, 2, 3, 5, 6, 8, 8, 10, 17, 32))
    tokens = max(1, draw.choice((1, 40, 300, 3000, 9000 // min(world, 6))) // (world * top_k))
    experts, mode = draw.choice((1, 2, 7, 64, 130, 1024)), draw.choice(("ep", "tp"))
    local = experts if mode == "tp" else -(-experts // world)
    segments = min(draw.choice((1, 1, 2, 5, 40)), 1536 // local)
    return sizes(world, tokens, top_k, experts, draw.choice((8, 1288)), 72 * world, mode, segments)


@pytest.fixture(scope="module")
def few_threads(tmp_path_factory, library):
    return emulated.build(tmp_path_factory.mktemp("few_threads"), emulated.FEW_THREADS)[0]


@pytest.mark.parametrize("seed", range(24))
def test_tables_of_any_sizes(few_threads, seed):
    """One builder and eight, one sender and eight, pairs at once and in rounds, drawn by every rank for itself."""
    run_tables(few_threads, seed, **draw_table_sizes(random.Random(seed)))


EXCHANGE, BUILD = "exchange.cuh", "sort_pairs.cuh"
SYNC = "    __syncthreads();"
LEFT_OUT = {  # file, text, other text
    "nothing": None,
    "the first barrier": (EXCHANGE, "    cluster_barrier(senders > 1 && me.warp == 0);", ""),
    "the second barrier": (EXCHANGE, "    cluster_barrier(me.block == 0 && me.warp == 0);", SYNC),
    "the third barrier": (BUILD, "    cluster_barrier(me.warp * 32 * groups_per_thread(g) < groups);", SYNC),
    "a barrier of sums": (BUILD, "= sum[i];\n    }\n" + SYNC, "= sum[i];\n    }"),
    "the end of counting": (BUILD, "count_warp(g, me, s, a, w, parity);\n" + SYNC, "count_warp(g, me, s, a, w, parity);"),
    "the barrier in front of places": (BUILD, "        __syncthreads();  // a warp", "        // a warp"),
    "the barrier behind places": (BUILD, "place_warp(g, me, s, a, w);\n    " + SYNC, "place_warp(g, me, s, a, w);"),
    "the barrier between rounds": (BUILD, "break;\n    " + SYNC, "break;"),
    "the first rounds": (BUILD, "if (!placed || round != block.first) {", "if (!placed) {"),
    "what a round has placed": (BUILD, "        pass_round(g, me, a);", ""),
    "one's own place": (BUILD, "[me.block * groups + group] = sum;", "[(me.block ^ 1) * groups + group] = sum;"),
    "the ends of ranges": (BUILD, "{first, min(all, first + each)};", "{first, min(all, first + each + 1)};"),
    "the ranks of a block": (BUILD, "while (of_all >= s.first_token[rank + 1] * k) ++rank;", ""),
    "earlier jobs of a warp": (BUILD, "uint16_t(before.lasts);", "uint16_t(0);"),
    "the ends of chunks": (BUILD, "(chunk + 1) * c.job_chunk)", "(chunk + 1) * c.job_chunk + 1)"),
    "the rest of a step": (BUILD, "            from = last;  //", "            //"),
}


def run_all_tables(folder: str) -> None:
    emulated.NOBODY_MOVES = 100_000
    library = emulated.load(Path(folder))
    for seed in range(80):  # few groups, and more than threads of a block
        chosen = sizes(2, 40, 8, 200, 8, 144, "tp", 1) if seed % 2 else sizes(2, 100 + seed, 8, 7, 8, 144, "ep", 2)
        run_tables(library, seed, **chosen)


def run_all_sizes(folder: str) -> None:
    emulated.NOBODY_MOVES = 300_000
    library = emulated.load(Path(folder))
    for index, chosen in enumerate(SIZES):
        run_calls(library, seed=100 + index, calls=3, **chosen)


def ends_well(run: Callable[[str], None], folder: Path, *changes: tuple[str, str, str]) -> bool:
    """Whether `run` does with changed kernels, in a process of its own, which may end in any way."""
    emulated.build(folder, emulated.FEW_THREADS, *changes)
    code = f"import test_emulated_tables as t; t.{run.__name__}({str(folder)!r})"
    try:
        return subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parent, capture_output=True, timeout=120,
                              env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}).returncode == 0
    except subprocess.TimeoutExpired:  # a search in a table that is not there yet
        return False


TILES, SIZE = "(hidden + block_cols - 1) / block_cols, GROUP_COLS", "return uint32_t(first(group + 1) - first(group))"
WRONG_COLUMNS = {  # text in column_work.hpp, other text
    "nothing": None,
    "the cut tile is not counted": (TILES, "hidden / block_cols, GROUP_COLS"),
    "a cut step counts as a whole one": (TILES, "(hidden + GROUP_COLS - 1) / GROUP_COLS * 2, GROUP_COLS"),
    "the last group is waited for without one tile": (SIZE, SIZE + " - (group == 3)"),
    "tiles are counted for the next group": ("columns.of(col_block / per_step)", "columns.of((col_block + 1) / per_step)"),
    "groups begin elsewhere than they are counted": ("return group * steps / groups;", "return (group * steps + 1) / groups;"),
    "some columns of a group are in no slice": ("(index + 1) * steps / slices * SLICE_STEP)}",
                                                "(index + 1) * (steps / slices) * SLICE_STEP)}"),
}


CHANGES = {**{("left_out", name): (run_all_tables, change) for name, change in LEFT_OUT.items()},
           **{("wrong", name): (run_all_sizes, change and ("column_work.hpp", *change)) for name, change in WRONG_COLUMNS.items()}}


@pytest.fixture(scope="module")
def ends(request, tmp_path_factory, library):
    """Whether each change that a chosen test asks for ends well: compiled and run as many at a time as there are processors."""
    here = [item.callspec.params for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    pool, found = ThreadPoolExecutor(os.cpu_count()), {}
    for kind, name in (asked for params in here for asked in params.items() if asked in CHANGES):
        run, change = CHANGES[kind, name]
        found[kind, name] = pool.submit(ends_well, run, tmp_path_factory.mktemp(kind), *([change] if change else []))
    yield found
    pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("left_out", LEFT_OUT)
def test_what_is_left_out_of_open_call_is_seen(ends, left_out):
    """Blocks and warps need their barriers: the tests above can fail."""
    assert ends["left_out", left_out].result() == (left_out == "nothing")


@pytest.mark.parametrize("wrong", WRONG_COLUMNS)
def test_wrong_columns_are_seen(ends, wrong):
    """Who counts tiles and who waits for them take the number from one place: only a tile that comes late shows a wrong one."""
    assert ends["wrong", wrong].result() == (wrong == "nothing")
