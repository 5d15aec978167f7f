"""Whole calls of the layer over NVLink on the emulated machine: the kernels' own code, with loops in place of the two GEMMs.
Tables against the golden ones, results against a formula, memory between guards, ranks that differ in all they may."""

from __future__ import annotations

import random

import emulated
import pytest
import torch
from emulated import Arguments, Emulation, Rank
from emulated_runs import (
    E4M3,
    FAILED,
    SIZES,
    VOID_REASON,
    check_result,
    check_tables,
    draw_arguments,
    draw_options,
    golden,
    run_calls,
    sizes,
    values_of,
)
from torch import Tensor

from moe_tk.weights.gemm import quantise_rows


@pytest.mark.parametrize("index", range(len(SIZES)))
def test_calls_of_all_ranks(library, index):
    run_calls(library, seed=100 + index, calls=3, **SIZES[index])


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


def check_slots(rank: Rank, arguments: list[Arguments], in_outputs: bool = False) -> None:
    """What GEMM 1 reads of placed rows, bit by bit: each slot's row is the one that was sent, in e4m3 with its scales; the rest of
    the buffer, padding too, is as it was. in_outputs: of a fused call, each in the place of its output."""
    g, pairs = rank.geometry, rank.table("slot_pair")[:rank.table("counts")[0]]
    buffer = rank.items["expert_out" if g.quantised else "slot_rows"].bytes
    bytes_of_row, blocks = g.hidden * (1 if g.quantised else 2), g.hidden // 128 if g.quantised else 0
    want = torch.full_like(buffer, emulated.POISON)
    if in_outputs:
        rows, rest = want[:2 * g.max_slots * g.hidden].view(g.max_slots, 2 * g.hidden).split(g.hidden, dim=1)
        runs = rest.view(-1, 128, g.hidden)[:, :blocks, :4 * 128].view(torch.float32)  # [row blocks, H / 128, 128 slots]
    else:
        rows = want[:g.max_slots * bytes_of_row].view(g.max_slots, bytes_of_row)
        runs = want[rows.numel():rows.numel() + 4 * blocks * g.max_slots].view(torch.float32).view(1, blocks, g.max_slots)
    arrived = rank.region("rows").view(-1, g.max_tokens, g.row_bytes)
    for slot, pair in enumerate(pairs.tolist()):
        if pair < 0:
            continue
        source, token = divmod(pair // g.top_k, g.max_tokens)
        if g.quantised:
            sent = arrived[source, token]
            scales = sent[g.hidden:g.hidden + 4 * blocks].view(torch.float32)
            runs[slot // runs.shape[2], :, slot % runs.shape[2]] = scales
            given = sent[:g.hidden].view(E4M3).float() * scales.repeat_interleave(128)
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
        place(emulation, seed, serial=1, placed=0, passes=1)


@pytest.mark.parametrize("world, tokens, hidden", [(1, 3, 512), (2, 90, 1152), (2, 40, 16384)])
def test_every_row_of_a_fused_call_is_placed_in_its_output(library, world, tokens, hidden):
    emulation = Emulation(library, dtype="float8_e4m3fn", **sizes(world, tokens, 4, 5, hidden, 128 * world, "ep", 1))
    for seed in range(2):
        place(emulation, seed, serial=0, placed=1, row_block=128, in_outputs=True)


def place(emulation: Emulation, seed: int, in_outputs: bool = False, **options: int) -> None:
    """A call that ends when rows are in their slots."""
    draw = random.Random(seed)
    arguments = [draw_arguments(draw, rank, 5, True) for rank in emulation.ranks]
    for rank, a in zip(emulation.ranks, arguments, strict=True):
        a.options.update(only_placed=1, **options)
        rank.poison()
        rank.region("rows").fill_(0x55)  # what is copied too much is seen
    emulation.call(arguments, seed)
    for rank in emulation.ranks:
        check_tables(rank, arguments)
        check_slots(rank, arguments, in_outputs)


@pytest.mark.parametrize("mode, passes", [("ep", 1), ("tp", 2)])
def test_outputs_overwrite_no_row_that_is_still_read(library, mode, passes):
    """Several row blocks an expert, placed in their outputs: GEMM 2 stores those of one while GEMM 1 still reads others."""
    emulation = Emulation(library, dtype="float8_e4m3fn", **sizes(2, 200, 4, 6, 512, 1024, mode, 1))
    for seed in range(3):
        draw = random.Random(seed)
        arguments = [draw_arguments(draw, rank, 5, True) for rank in emulation.ranks]
        for rank, a in zip(emulation.ranks, arguments, strict=True):
            a.options.update(serial=0, placed=1, row_block=128, passes=passes)
            rank.poison()
        outs = emulation.call(arguments, seed)
        for rank, a, out in zip(emulation.ranks, arguments, outs, strict=True):
            check_tables(rank, arguments)
            check_result(emulation.ranks, a, out)


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
    """More work than ENOUGH_ITEMS: jobs and tokens are taken several at a time."""
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
