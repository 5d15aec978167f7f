"""Whole calls of the layer over NVLink on the emulated machine: the kernels' own code, with loops in place of the two GEMMs.
Tables against the golden ones, results against a formula, memory between guards, ranks that differ in all they may."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import emulated
import pytest
import torch
from emulated import Arguments, Emulation, Rank
from torch import Tensor

from moe_tk.memory.nvlink_layout import JOB_CHUNK, ROW_BLOCKS
from moe_tk.schedule import Tables, build_tables
from moe_tk.schedule.orders import task_order
from moe_tk.weights.gemm import quantise_rows

E4M3 = torch.float8_e4m3fn
TABLES = ("expert_offsets", "slot_pair", "block_target", "block_group", "job_order", "chunk_expected",
          "expert_load", "token_counts")
FAILED, VOID_REASON = 0, 1
LITTLE_SHARED = 8 * 1024  # open_call takes pairs in rounds


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    loaded, why_not = emulated.build(tmp_path_factory.mktemp("emulator"))
    if loaded is None:
        pytest.skip(why_not)
    return loaded


def draw_options(draw: random.Random, quantised: bool, max_segments: int) -> dict[str, int]:
    """What a rank chooses for itself."""
    serial = draw.random() < 0.3
    build = {"shared_bytes": draw.choice((227 * 1024, LITTLE_SHARED)),
             "one_sender_pairs": draw.choice((0, 10**6)), "one_builder_pairs": draw.choice((0, 10**6))}
    return {**build, "serial": serial, "row_block": draw.choice(ROW_BLOCKS),
            "gather_cols": 256 if quantised else draw.choice((128, 256)),
            "scatter_cols": draw.choice((128, 256)), "passes": 1 if serial else draw.randint(1, 4),
            "segments": draw.randint(1, max_segments), "cluster": draw.choice((1, 2))}


def draw_arguments(draw: random.Random, rank: Rank, most_expert: int, before_l2: bool) -> Arguments:
    """T is none, all, or any; ids -1 and E are skipped; small numbers, so that bf16 sums are exact."""
    g = rank.geometry
    torch.manual_seed(draw.getrandbits(30))
    tokens = draw.choice((0, g.max_tokens, draw.randint(0, g.max_tokens)))
    x = torch.randint(-3, 4, (tokens, g.hidden)).bfloat16()
    scales = None
    if g.quantised:
        x = torch.randn(tokens, g.hidden).bfloat16()
        if draw.random() < 0.4:
            x, scales = quantise_rows(x)
            scales = scales.t().contiguous()
    ids = torch.randint(-1, most_expert + 1, (tokens, g.top_k), dtype=draw.choice((torch.int32, torch.int64)))
    weights = torch.tensor([0.5, 1.0, 2.0])[torch.randint(0, 3, (tokens, g.top_k))]
    options = {**draw_options(draw, g.quantised, g.max_segments), "weights_before_l2": before_l2}
    return Arguments(x, scales, ids, weights.to(draw.choice((torch.float32, torch.bfloat16))), options)


def golden(rank: Rank, arguments: list[Arguments], options: dict[str, int]) -> Tables:
    g = rank.geometry
    ids = torch.full((g.world * g.max_tokens, g.top_k), -1, dtype=torch.int64)
    for source, a in enumerate(arguments):
        ids[source * g.max_tokens:source * g.max_tokens + len(a.x)] = a.ids
    return build_tables(ids, token_counts=[len(a.x) for a in arguments], world=g.world, rank=g.rank, mode=g.mode,
                        num_experts=g.num_experts, row_block=options["row_block"], segments=options["segments"],
                        job_chunk=JOB_CHUNK, impl="golden")


def check_tables(rank: Rank, arguments: list[Arguments]) -> None:
    g, mine = rank.geometry, arguments[rank.geometry.rank]
    want = golden(rank, arguments, mine.options)
    columns = -(-2 * g.padded_intermediate // mine.options["gather_cols"]), -(-g.hidden // mine.options["scatter_cols"])
    blocks = len(want.block_group)
    assert rank.table("counts").tolist() == [len(want.slot_pair), blocks, len(want.job_order), *(blocks * c for c in columns)]
    expected = {name: getattr(want, name) for name in TABLES}
    per_step = 256 // mine.options["scatter_cols"]
    expected |= {"tasks1": task_order(want, columns[0]), "tasks2": task_order(want, columns[1], mine.options["passes"], per_step)}
    for name, table in expected.items():
        assert torch.equal(rank.table(name)[:table.numel()], table.reshape(-1).int()), name
    assert torch.equal(rank.table("contributors", torch.int64)[:len(mine.x)], want.contributors[:len(mine.x)])
    slots, weights = rank.table("slots").view(g.world, g.max_tokens, g.top_k), torch.zeros(g.world, g.max_tokens, g.top_k)
    for source, a in enumerate(arguments):
        weights[source, :len(a.x)] = a.weights.float()
        assert torch.equal(slots[source, :len(a.x)], want.slots.view_as(slots)[source, :len(a.x)])
    real = want.slot_pair >= 0
    assert torch.equal(rank.table("slot_weight", torch.float32)[:len(real)][real], weights.view(-1)[want.slot_pair[real].long()])


def values_of(a: Arguments, quantised: bool) -> Tensor:
    """[T, H] float32: the rows as the GEMM sees them."""
    if not quantised or len(a.x) == 0:
        return a.x.float()
    rows, scales = (a.x, a.scales) if a.scales is not None else (lambda q, s: (q, s.t()))(*quantise_rows(a.x))
    return rows.float() * scales.repeat_interleave(128, 1)


def check_result(ranks: list[Rank], a: Arguments, out: Tensor) -> None:
    """Against sum over ranks and choices of weight * (1 + expert mod 3) * x[c mod I mod H]."""
    x, want = values_of(a, ranks[0].geometry.quantised), torch.zeros(out.shape)
    for g in (rank.geometry for rank in ranks):
        here = (a.ids >= g.first_expert) & (a.ids < g.first_expert + g.num_local_experts)
        factor = (a.weights.float() * (1 + a.ids % 3) * here).sum(1, keepdim=True)
        want += factor * x[:, torch.arange(g.hidden) % g.padded_intermediate % g.hidden]
    largest = max(1.0, float(want.abs().max())) if want.numel() else 1.0
    assert not out.isnan().any()
    assert torch.allclose(out.float(), want, rtol=0, atol=(0.1 if ranks[0].geometry.quantised else 0.02) * largest)


def run_calls(library, seed: int, calls: int, **geometry) -> None:
    """Calls one after the other on one workspace, some with poisoned rows, some refused by a rank."""
    draw = random.Random(seed)
    emulation = Emulation(library, **geometry)
    ranks, experts = emulation.ranks, geometry["num_experts"]
    for call in range(calls):
        most = draw.choice((experts, max(1, experts // 4), 1))
        arguments = [draw_arguments(draw, rank, most, call % 2 == 0) for rank in ranks]
        if draw.random() < 0.5:
            for rank in ranks:
                rank.poison()
        refuses = draw.randrange(len(ranks)) if draw.random() < 0.15 else None
        if refuses is not None:
            a = arguments[refuses]
            a.x, a.ids, a.weights, a.scales = a.x[:0], a.ids[:0], a.weights[:0], None
            a.options.update(refused=1, only_open=1)
        outs = emulation.call(arguments, seed + call)
        for rank, a, out in zip(ranks, arguments, outs, strict=True):
            assert rank.mailbox[FAILED] == 0 and bool(rank.mailbox[VOID_REASON]) == (refuses is not None)
            rank.mailbox.zero_()
            if refuses is not None:
                assert out.isnan().all() and rank.table("counts").tolist() == [0] * 5
            else:
                check_tables(rank, arguments)
                check_result(ranks, a, out)


def draw_table_sizes(draw: random.Random) -> dict:
    """Anything that a workspace takes, small in all at once."""
    world, top_k = draw.choice((1, 2, 2, 3, 8, 1, 2, 32)), draw.choice((1, 2, 3, 5, 6, 8, 8, 10, 17, 32))
    tokens = max(1, draw.choice((1, 40, 300, 3000, 9000 // min(world, 6))) // (world * top_k))
    experts, mode = draw.choice((1, 2, 7, 64, 130, 1024)), draw.choice(("ep", "tp"))
    local = experts if mode == "tp" else -(-experts // world)
    segments = min(draw.choice((1, 1, 2, 5, 40)), 1536 // local)
    return sizes(world, tokens, top_k, experts, draw.choice((8, 1288)), 72 * world, mode, segments)


def run_tables(library, seed: int, **geometry) -> None:
    """Two calls on one workspace that stop when their tables are there."""
    draw = random.Random(seed)
    emulation, experts = Emulation(library, **geometry), geometry["num_experts"]
    for call in range(2):
        most = draw.choice((experts, experts, max(1, experts // 4), 1))
        arguments = [draw_arguments(draw, rank, most, True) for rank in emulation.ranks]
        for rank, a in zip(emulation.ranks, arguments, strict=True):
            a.options["only_open"] = 1
            groups = a.options["segments"] * rank.geometry.num_local_experts
            little = max(LITTLE_SHARED, (8 + groups // 8) * 1024)  # four warps have some steps
            a.options["shared_bytes"] = draw.choice((227 * 1024, little))
        emulation.call(arguments, seed + call)
        for rank in emulation.ranks:
            assert rank.mailbox[FAILED] == 0 == rank.mailbox[VOID_REASON]
            check_tables(rank, arguments)


def sizes(world: int, tokens: int, top_k: int, experts: int, hidden: int, inter: int, mode: str, segments: int) -> dict:
    return dict(world=world, max_tokens=tokens, top_k=top_k, num_experts=experts, hidden=hidden, intermediate_size=inter, mode=mode,
                max_segments=segments)


FP8 = dict(dtype="float8_e4m3fn")
SIZES = [  # I of each rank is not below H: with fewer columns the rest of a row would not come to the result
    sizes(1, 33, 5, 7, 264, 297, "ep", 1), sizes(2, 130, 8, 7, 1288, 1288, "ep", 3), sizes(2, 20, 32, 64, 8, 18, "tp", 1),
    sizes(3, 70, 4, 2, 2056, 2064, "ep", 2), sizes(2, 50, 4, 6, 1160, 1160, "ep", 1),  # one tile of 128 in the last step, and two
    sizes(1, 40, 3, 5, 2176, 2176, "ep", 1) | FP8,
    sizes(2, 60, 6, 13, 4096, 4096, "ep", 2) | FP8, sizes(2, 31, 8, 5, 384, 768, "tp", 1) | FP8,
    sizes(2, 20, 2, 5, 6272, 6272, "ep", 1) | FP8,  # scales of a row in two pieces of it
]


@pytest.mark.parametrize("index", range(len(SIZES)))
def test_calls_of_all_ranks(library, index):
    run_calls(library, seed=100 + index, calls=3, **SIZES[index])


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
    code = f"import test_emulated_calls as t; t.{run.__name__}({str(folder)!r})"
    try:
        return subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parent, capture_output=True, timeout=120,
                              env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}).returncode == 0
    except subprocess.TimeoutExpired:  # a search in a table that is not there yet
        return False


@pytest.mark.parametrize("left_out", LEFT_OUT)
def test_what_is_left_out_of_open_call_is_seen(library, tmp_path, left_out):
    """Blocks and warps need their barriers: the tests above can fail."""
    changes = () if left_out == "nothing" else (LEFT_OUT[left_out],)
    assert ends_well(run_all_tables, tmp_path, *changes) == (left_out == "nothing")


TILES, SIZE = "(hidden + block_cols - 1) / block_cols, GROUP_COLS", "return uint32_t(first(group + 1) - first(group))"
WRONG_COLUMNS = {  # text in column_work.hpp, other text
    "nothing": ("", ""),
    "the cut tile is not counted": (TILES, "hidden / block_cols, GROUP_COLS"),
    "a cut step counts as a whole one": (TILES, "(hidden + GROUP_COLS - 1) / GROUP_COLS * 2, GROUP_COLS"),
    "the last group is waited for without one tile": (SIZE, SIZE + " - (group == 3)"),
    "tiles are counted for the next group": ("columns.of(col_block / per_step)", "columns.of((col_block + 1) / per_step)"),
    "groups begin elsewhere than they are counted": ("return group * steps / groups;", "return (group * steps + 1) / groups;"),
    "some columns of a group are in no slice": ("(index + 1) * steps / slices * SLICE_STEP)}",
                                                "(index + 1) * (steps / slices) * SLICE_STEP)}"),
}


@pytest.mark.parametrize("wrong", WRONG_COLUMNS)
def test_wrong_columns_are_seen(library, tmp_path, wrong):
    """Who counts tiles and who waits for them take the number from one place: only a tile that comes late shows a wrong one."""
    changes = () if wrong == "nothing" else (("column_work.hpp", *WRONG_COLUMNS[wrong]),)
    assert ends_well(run_all_sizes, tmp_path, *changes) == (wrong == "nothing")


BEFORE_ROWS = "    bool heard = true;\n"
LATE_ROWS = ("export_rows.cuh", BEFORE_ROWS,
             f"    for (int i = 0; c.rank == 1 && threadIdx.x == 0 && i < 20'000; ++i) nap_ns(100);\n{BEFORE_ROWS}")


@pytest.fixture(scope="module")
def late_rows(tmp_path_factory, library):
    """Rank 1 sends its rows long after everybody's tables are there."""
    return emulated.build(tmp_path_factory.mktemp("late_rows"), emulated.FEW_THREADS, LATE_ROWS)[0]


@pytest.mark.parametrize("serial", (0, 1))
@pytest.mark.parametrize("tokens", (20, 0))
def test_rows_that_come_late_are_waited_for(late_rows, tokens, serial):
    """Also by a rank without tokens of its own, whose tensor has no address."""
    emulation, draw = Emulation(late_rows, **sizes(2, 20, 4, 6, 264, 297, "ep", 1)), random.Random(1)
    arguments = [draw_arguments(draw, rank, 5, True) for rank in emulation.ranks]
    for a, count in zip(arguments, (tokens, 20), strict=True):
        a.x, a.ids, a.weights = torch.randint(-3, 4, (count, 264)).bfloat16(), torch.randint(0, 6, (count, 4)), torch.ones(count, 4)
        a.options["serial"] = serial
    for rank in emulation.ranks:
        rank.poison()
    for rank, a, out in zip(emulation.ranks, arguments, emulation.call(arguments, 1), strict=True):
        check_tables(rank, arguments)
        check_result(emulation.ranks, a, out)


def check_slots(rank: Rank, arguments: list[Arguments]) -> None:
    """What a serial call's GEMM 1 reads, bit by bit: each slot's row is the one that was sent, in e4m3 with its scales; the rest of
    the buffer, padding too, is as it was."""
    g, pairs = rank.geometry, rank.table("slot_pair")[:rank.table("counts")[0]]
    buffer = rank.items["expert_out" if g.quantised else "slot_rows"].bytes
    bytes_of_row, blocks = g.hidden * (1 if g.quantised else 2), g.hidden // 128 if g.quantised else 0
    want = torch.full_like(buffer, emulated.POISON)
    rows = want[:g.max_slots * bytes_of_row].view(g.max_slots, bytes_of_row)
    scales = want[rows.numel():rows.numel() + 4 * blocks * g.max_slots].view(torch.float32).view(blocks, g.max_slots)
    arrived = rank.region("rows").view(-1, g.max_tokens, g.row_bytes)
    for slot, pair in enumerate(pairs.tolist()):
        if pair < 0:
            continue
        source, token = divmod(pair // g.top_k, g.max_tokens)
        if g.quantised:
            sent = arrived[source, token]
            scales[:, slot] = sent[g.hidden:g.hidden + 4 * blocks].view(torch.float32)
            given = sent[:g.hidden].view(E4M3).float() * scales[:, slot].repeat_interleave(128)
            own = values_of(arguments[source], True)[token]
            torch.testing.assert_close(given, own, rtol=0.13, atol=0.01)  # a value may fall to its neighbour
        else:
            sent = arguments[source].x[token].view(torch.uint8)
        rows[slot] = sent[:bytes_of_row]
    assert torch.equal(buffer, want)


@pytest.mark.parametrize("dtype, hidden", [("bfloat16", 264), ("bfloat16", 4104), ("float8_e4m3fn", 128), ("float8_e4m3fn", 2176),
                                           ("float8_e4m3fn", 6272)])
@pytest.mark.parametrize("world, tokens", [(1, 3), (2, 2), (2, 40)])  # few rows are cut into slices
def test_every_slot_of_a_serial_call_has_its_row(library, dtype, hidden, world, tokens):
    emulation = Emulation(library, dtype=dtype, **sizes(world, tokens, 4, 5, hidden, 128 * world, "ep", 1))
    for seed in range(3):
        draw = random.Random(seed)
        arguments = [draw_arguments(draw, rank, 5, True) for rank in emulation.ranks]
        for rank, a in zip(emulation.ranks, arguments, strict=True):
            a.options.update(serial=1, only_placed=1, passes=1)
            rank.poison()
            rank.region("rows").fill_(0x55)  # what is copied too much is seen
        emulation.call(arguments, seed)
        for rank in emulation.ranks:
            check_tables(rank, arguments)
            check_slots(rank, arguments)


def sums_of(ranks: list[Rank], a: Arguments, before_l2: bool) -> Tensor:
    """[T, H] bfloat16, bit by bit: choices in their order in float32, each rank's part rounded, parts added in rank order."""
    total = torch.zeros(len(a.x), ranks[0].geometry.hidden)
    for g in (rank.geometry for rank in ranks):
        x, part = a.x.float()[:, torch.arange(g.hidden) % g.padded_intermediate % g.hidden], torch.zeros_like(total)
        for choice in range(g.top_k):
            id, weight = a.ids[:, choice], a.weights[:, choice].float()
            here = ((id >= g.first_expert) & (id < g.first_expert + g.num_local_experts))[:, None]
            factor = (1 + id % 3).float() * (weight if before_l2 else 1.0)
            row = (x * factor[:, None]).bfloat16().float() * (1.0 if before_l2 else weight[:, None])
            part = torch.where(here, part + row, part)
        total = total + part.bfloat16().float()
    return total.bfloat16()


@pytest.mark.parametrize("before_l2", [0, 1])
@pytest.mark.parametrize("world, top_k, hidden", [(1, 3, 520), (2, 8, 264), (3, 6, 1032), (4, 30, 136)])
def test_sums_are_rounded_and_added_in_rank_order(library, world, top_k, hidden, before_l2):
    """Also an own token's, whose part of this rank goes through no plane; in the fused pattern and in the serial one."""
    draw = random.Random(world)
    emulation = Emulation(library, **sizes(world, 25, top_k, 32, hidden, hidden, "ep", 1))
    for call in range(2):
        arguments = []
        for rank in emulation.ranks:
            a = draw_arguments(draw, rank, 32, bool(before_l2))
            a.x = torch.randn(a.x.shape).bfloat16()
            # Powers of two, so that products are exact, and far apart, so that the order of the ranks is seen.
            a.weights = torch.exp2(14.0 * torch.randint(-1, 2, a.weights.shape)) * (2.0 * torch.randint(0, 2, a.weights.shape) - 1)
            a.options.update(weights_before_l2=before_l2)
            arguments.append(a)
        outs = emulation.call(arguments, 31 * world + call)
        for a, out in zip(arguments, outs, strict=True):
            assert torch.equal(out, sums_of(emulation.ranks, a, bool(before_l2)))


def test_batches_of_many_jobs(library):
    """More work than ENOUGH_ITEMS: jobs and tokens are taken several at a time, and early."""
    emulation, draw = Emulation(library, **sizes(2, 1100, 2, 5, 1032, 2064, "tp", 1)), random.Random(1)
    arguments = [draw_arguments(draw, rank, 5, True) for rank in emulation.ranks]
    for a in arguments:
        a.x, a.options["serial"] = torch.randint(-3, 4, (1100, 1032)).bfloat16(), 0
        a.ids, a.weights = torch.randint(0, 5, (1100, 2)), torch.ones(1100, 2)
    for rank, a, out in zip(emulation.ranks, arguments, emulation.call(arguments, 1), strict=True):
        check_tables(rank, arguments)
        check_result(emulation.ranks, a, out)


def test_watermarks_that_are_ahead_are_refreshed(library):
    """The call of epoch 2^30 sets the watermarks of all chunks back: those of chunks without work would seem ahead one day."""
    emulation, draw, last = Emulation(library, **sizes(2, 70, 2, 6, 1032, 1032, "ep", 1)), random.Random(2), 2**30 - 1
    for rank in emulation.ranks:
        for name in ("epoch", "routing_sent"):
            rank.table(name).fill_(last)
        for name, value in (("posted", last), ("rows_posted", last), ("combined", last + 1000)):
            rank.region(name, torch.int32).fill_(value)
        rank.poison()
    arguments = [draw_arguments(draw, rank, 6, True) for rank in emulation.ranks]
    for rank, a, out in zip(emulation.ranks, arguments, emulation.call(arguments, 2), strict=True):
        check_result(emulation.ranks, a, out)
        assert {value - last - 1 for value in rank.region("combined", torch.int32).tolist()} <= {-1, 0}


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("mode", ["ep", "tp"])
def test_a_call_without_rows_sends_none(library, dtype, mode):
    """gemm_combine has tokens with a routing, but no rows of theirs: tables as always, and the places for rows stay as they are."""
    emulation, draw = Emulation(library, dtype=dtype, **sizes(2, 40, 4, 6, 256, 512, mode, 1)), random.Random(4)
    for rank in emulation.ranks:
        rank.poison()
    arguments = [draw_arguments(draw, rank, 6, True) for rank in emulation.ranks]
    for a in arguments:
        a.x, a.scales, a.ids, a.weights = torch.zeros(40, 256).bfloat16(), None, torch.randint(0, 6, (40, 4)), torch.ones(40, 4)
        a.options.update(only_open=1, hidden_states=0)
    emulation.call(arguments, 4)
    for rank in emulation.ranks:
        assert rank.mailbox[FAILED] == 0 == rank.mailbox[VOID_REASON]
        check_tables(rank, arguments)
        assert (rank.region("rows") == emulated.POISON).all()


class HandedOut:
    """Room for the results of dispatch_gemm on one rank, between guards and with anything in it."""

    def __init__(self, rank: Rank, stride: int) -> None:
        g, self.stride = rank.geometry, stride
        self.size = 1 if g.quantised else 2
        self.rows, self.inter = g.max_slots, g.padded_intermediate
        shapes = {"activated": self.rows * self.inter * self.size, "slots_out": 4 * g.world * stride * g.top_k,
                  "offsets_out": 4 * (g.num_local_experts + 1)}
        if g.quantised:
            shapes["activated_scales"] = 4 * self.rows * self.inter // 128
        self.memory = {name: emulated.Guarded(size, 0x5a) for name, size in shapes.items()}

    def options(self) -> dict[str, int]:
        return {"hands_out": 1, "stride": self.stride, **{name: memory.address for name, memory in self.memory.items()}}

    def get(self, name: str, dtype: torch.dtype) -> Tensor:
        assert self.memory[name].intact(), f"something was written beside {name}"
        return self.memory[name].bytes.view(dtype)

    def check(self, rank: Rank, arguments: list[Arguments]) -> None:
        """Against the golden tables; column c of a row that is there is the row's own."""
        g, want = rank.geometry, golden(rank, arguments, arguments[rank.geometry.rank].options)
        slots = want.slots.view(g.world, g.max_tokens, g.top_k)[:, :self.stride]
        assert torch.equal(self.get("slots_out", torch.int32), slots.reshape(-1))
        assert torch.equal(self.get("offsets_out", torch.int32), want.expert_offsets)
        pairs = torch.full((self.rows,), -1)
        pairs[:len(want.slot_pair)] = want.slot_pair.long()
        left = pairs >= 0
        activated = self.get("activated", torch.uint8).view(self.rows, -1)
        assert bool((activated[~left] == 0).all())
        source, token = pairs[left] // g.top_k // g.max_tokens, pairs[left] // g.top_k % g.max_tokens
        rows = torch.stack([arguments[s].x[t] for s, t in zip(source.tolist(), token.tolist(), strict=True)])
        assert torch.equal(activated[left], rows.view(torch.uint8)[:, :self.inter * self.size])
        if g.quantised:
            scales = self.get("activated_scales", torch.float32).view(-1, self.rows)
            assert bool((scales[:, ~left] == 1).all())
            of_rows = torch.stack([arguments[s].scales[t] for s, t in zip(source.tolist(), token.tolist(), strict=True)])
            assert torch.equal(scales[:, left], of_rows.t()[:len(scales)])

    def check_nothing(self) -> None:
        assert bool((self.get("slots_out", torch.int32) == -1).all() and (self.get("offsets_out", torch.int32) == 0).all())
        dtype = torch.float8_e4m3fn if self.size == 1 else torch.bfloat16
        assert bool(self.get("activated", dtype).float().isnan().all())
        if self.size == 1:
            assert bool(self.get("activated_scales", torch.float32).isnan().all())


@pytest.mark.parametrize("refuses", [None, 1])
@pytest.mark.parametrize("dtype, mode, row_block", [("bfloat16", "ep", 64), ("float8_e4m3fn", "ep", 128),
                                                    ("float8_e4m3fn", "tp", 64)])
def test_dispatch_gemm_hands_its_results_out(library, dtype, mode, row_block, refuses):
    """hand_out over what the launches before it have left, with more rows than slots are used, and a stride below max_tokens."""
    emulation = Emulation(library, dtype=dtype, **sizes(2, 40, 3, 5, 384, 256 * (2 if mode == "tp" else 1), mode, 1))
    draw, arguments, results = random.Random(5), [], []
    for rank, tokens in zip(emulation.ranks, (33, 20), strict=True):
        rank.poison()
        x, scales = torch.randn(tokens, 384).bfloat16(), None
        if rank.geometry.quantised:
            x, scales = quantise_rows(x)
            scales = scales.t().contiguous()
        results.append(HandedOut(rank, stride=33))
        options = {**draw_options(draw, rank.geometry.quantised, 1), "serial": 0, "row_block": row_block, "weights_before_l2": 1}
        arguments.append(Arguments(x, scales, torch.randint(-1, 5, (tokens, 3)), torch.ones(tokens, 3),
                                   {**options, **results[-1].options()}))
    if refuses is not None:
        a = arguments[refuses]
        a.x, a.ids, a.weights, a.scales = a.x[:0], a.ids[:0], a.weights[:0], None
        a.options.update(refused=1, only_open=1)
    emulation.call(arguments, 5)
    for rank, result in zip(emulation.ranks, results, strict=True):
        if refuses is None:
            result.check(rank, arguments)
        elif rank.geometry.rank != refuses:
            result.check_nothing()


@pytest.mark.parametrize("how", ["takes_part", "only_open"])
@pytest.mark.parametrize("dtype, serial", [("bfloat16", 0), ("bfloat16", 1), ("float8_e4m3fn", 0), ("float8_e4m3fn", 1)])
def test_a_rank_that_does_not_come_stops_nobody_for_ever(library, dtype, serial, how):
    """One of three ranks never begins, or stops after open_call: the others end, without a result, and tell their hosts."""
    emulation, draw = Emulation(library, dtype=dtype, **sizes(3, 40, 4, 6, 1024, 384, "tp", 1)), random.Random(3)
    options = {**draw_options(draw, dtype != "bfloat16", 1), "weights_before_l2": 1, "most_naps": 200_000, "serial": serial}
    arguments = [Arguments(torch.randn(40, 1024).bfloat16(), None, torch.randint(0, 6, (40, 4)), torch.rand(40, 4),
                           dict(options)) for _ in emulation.ranks]
    arguments[1].options[how] = int(how == "only_open")
    outs = emulation.call(arguments, 3)
    for rank in (0, 2):
        assert outs[rank].isnan().all() and emulation.ranks[rank].mailbox[FAILED] != 0
        assert emulation.ranks[rank].region("control", torch.int32)[0] != 0
