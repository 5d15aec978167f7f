"""Routings that hypothesis draws for the table tests, friendly and hostile."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

from moe_tk.schedule import PaddedTables, Tables, build_padded, build_tables, expert_range, trim

KINDS = ("uniform", "zipf", "hot_expert", "hot_rank", "few_experts", "duplicates", "half_invalid", "all_invalid",
         "out_of_range")


@dataclass(frozen=True)
class Case:
    """One routing of all ranks, and every argument of build_tables but the rank."""

    ids: Tensor
    counts: list[int]
    world: int
    num_experts: int
    mode: str
    row_block: int
    segments: int
    job_chunk: int

    @property
    def tokens(self) -> int:
        return self.ids.shape[0] // self.world

    @property
    def arguments(self) -> dict:
        return dict(token_counts=self.counts, world=self.world, num_experts=self.num_experts, mode=self.mode,
                    row_block=self.row_block, segments=self.segments, job_chunk=self.job_chunk)

    def build(self, rank: int, impl: str = "vectorised") -> Tables:
        return build_tables(self.ids, rank=rank, impl=impl, **self.arguments)

    def padded(self, rank: int) -> PaddedTables:
        arguments = self.arguments
        return build_padded(self.ids, torch.tensor(arguments.pop("token_counts")), rank=rank, **arguments)


def fill(kind: str, rows: int, top_k: int, num_experts: int, world: int, seed: int) -> Tensor:
    """[rows, top_k] int64 ids of one kind; rows may repeat an expert (SCH-05: the tables must stand it)."""
    generator = torch.Generator().manual_seed(seed)
    uniform = torch.rand((rows, top_k), generator=generator)
    ids = (uniform * num_experts).long().clamp(max=num_experts - 1)
    chance = torch.rand((rows, top_k), generator=generator)
    if kind == "zipf":
        popularity = torch.arange(1, num_experts + 1, dtype=torch.float64) ** -1.2
        ids = torch.searchsorted(popularity.cumsum(0) / popularity.sum(), uniform.double()).clamp(max=num_experts - 1)
    elif kind == "hot_expert":
        ids = torch.where(chance < 0.9, num_experts - 1, ids)
    elif kind == "hot_rank":
        first, count = expert_range(num_experts, world, 0)
        ids = first + ids % count
    elif kind == "few_experts":  # most experts are empty
        ids = ids // 3 * 3
    elif kind == "duplicates":
        ids = ids[:, :1].expand(rows, top_k).clone()
    elif kind == "half_invalid":
        ids = ids.masked_fill(chance < 0.4, -1).masked_fill(chance[:, :1] < 0.2, -1)
    elif kind == "all_invalid":
        ids.fill_(-1)
    elif kind == "out_of_range":
        hostile = torch.tensor([-2, -(2**31), num_experts, num_experts + 1, 2**30, 2**31 - 1])
        ids = torch.where(chance < 0.3, hostile[(uniform * 6).long()], ids)
    return ids


@st.composite
def cases(draw, max_tokens: int = 33, experts: tuple[int, ...] = (1, 2, 3, 5, 8, 30, 64, 128, 257, 1024)) -> Case:
    world = draw(st.integers(1, 8))
    tokens = draw(st.sampled_from([t for t in (0, 1, 2, 3, 5, 7, 8, 17, 33) if t <= max_tokens]))
    num_experts = draw(st.sampled_from(experts))
    top_k = draw(st.integers(1, 10))
    kind = draw(st.sampled_from(KINDS))
    ids = fill(kind, world * tokens, top_k, num_experts, world, draw(st.integers(0, 2**16)))
    full = draw(st.booleans())
    counts = [tokens] * world if full else draw(st.lists(st.integers(0, tokens), min_size=world, max_size=world))
    return Case(ids.to(draw(st.sampled_from([torch.int32, torch.int64]))), counts, world, num_experts,
                draw(st.sampled_from(["ep", "tp"])), draw(st.sampled_from([1, 4, 8])), draw(st.integers(1, 8)),
                draw(st.sampled_from([1, 3, 32])))


def assert_equal(seen: Tables, wanted: Tables) -> None:
    """Every table element by element, with its dtype."""
    for name, table in wanted.tensors().items():
        other = seen.tensors()[name]
        assert other.dtype == table.dtype and other.shape == table.shape, (name, other.shape, table.shape)
        assert torch.equal(other, table), (name, other, table)


def assert_padded_equals(padded: PaddedTables, wanted: Tables) -> None:
    """Capacity-length tables: equal up to their counts, -1 (block_target: 0) behind."""
    assert_equal(trim(padded), wanted)
    tables = padded.tables
    for name, count in (("slot_pair", padded.num_slots), ("block_group", padded.num_blocks),
                        ("delivery_order", padded.num_jobs), ("job_order", padded.num_jobs)):
        assert bool((getattr(tables, name)[int(count):] == -1).all()), name
    assert bool((tables.block_target[int(padded.num_blocks):] == 0).all())
