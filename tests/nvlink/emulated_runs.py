"""Calls and tables on the emulated machine: drawn arguments, and what must come of them."""

from __future__ import annotations

import random

import torch
from emulated import Arguments, Emulation, Rank
from torch import Tensor

from moe_tk.memory.nvlink_layout import JOB_CHUNK, ROW_BLOCKS
from moe_tk.planner.fused_tiles import PLACED_HIDDEN
from moe_tk.schedule import Tables, build_tables
from moe_tk.schedule.orders import task_order
from moe_tk.weights.gemm import quantise_rows

E4M3 = torch.float8_e4m3fn
TABLES = ("expert_offsets", "slot_pair", "block_target", "block_group", "job_order", "chunk_expected",
          "expert_load", "token_counts")
FAILED, VOID_REASON = 0, 1
LITTLE_SHARED = 8 * 1024  # open_call takes pairs in rounds


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
    may_be_placed = g.quantised and not options["serial"] and options["row_block"] == 128 and g.hidden >= PLACED_HIDDEN[0]
    options["placed"] = may_be_placed and draw.random() < 0.5
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
