"""check_tables: every table against the routing it was made from, from first principles (the builders are not used).

numpy on the host: for tests and for validate mode, not for the hot path.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from moe_tk.errors import ArgumentError, ScheduleError
from moe_tk.schedule.ownership import local_experts
from moe_tk.schedule.tables import Tables


@dataclass(frozen=True, slots=True)
class _Facts:
    """What follows from the routing alone, for one rank."""

    ids: np.ndarray       # [R * T, k] int64
    present: np.ndarray   # [R * T] row is a token
    segment: np.ndarray   # [R * T]
    local: np.ndarray     # [R * T, k] pair is computed here
    group: np.ndarray     # [R * T, k] where local, else -1
    in_group: np.ndarray  # [S * E_local] pairs of each group


def check_tables(tables: Tables, topk_ids: Tensor) -> None:
    """Raises ScheduleError, with table, index, seen and wanted, at the first entry that breaks an invariant.

    `topk_ids` is the [world * T, k] routing that the tables were made from. Tables at capacity length must be
    trimmed first. Checked, in this order: what the tables say of this rank; expert_load; offsets (multiples of
    row_block, width of every group); slots (-1 exactly where a pair is not local, else inside the group's range,
    unique, ascending with the pair); slot_pair (the inverse, -1 in padding); block_group; block_target (rows of the
    block that are no padding, so that their sum is the number of local pairs); delivery_order and job_order (the rows
    with work here, each once, by smallest / largest slot); expected, chunk_expected; send_count, send_order (own
    tokens that the destination wants, in the order of the destination's slots), contributors.
    """
    if tuple(topk_ids.shape) != (tables.world * tables.tokens_per_rank, tables.top_k):
        raise ArgumentError(f"check_tables: topk_ids has shape {tuple(topk_ids.shape)}, the tables were made from "
                            f"({tables.world * tables.tokens_per_rank}, {tables.top_k})")
    arrays = {name: table.detach().cpu().numpy().astype(np.int64) for name, table in tables.tensors().items()}
    facts = _facts(tables, arrays["token_counts"], topk_ids.detach().cpu().numpy().astype(np.int64))
    _check_groups(tables, arrays, facts)
    _check_slots(tables, arrays, facts)
    _check_blocks(tables, arrays)
    _check_rows(tables, arrays)
    _check_sends(tables, arrays, facts)


def check_ids(topk_ids: Tensor, *, token_counts: Tensor, world: int, num_experts: int) -> None:
    """Validate mode: raises ArgumentError with rank, token, slot and value at the first id that is neither -1 nor an
    expert. Without it such ids are skipped like -1. Rows behind token_counts[rank] are not looked at."""
    ids = topk_ids.detach().cpu().numpy()
    tokens = ids.shape[0] // world
    present = np.arange(tokens) < np.asarray(token_counts).reshape(-1, 1)
    bad = np.argwhere(((ids < -1) | (ids >= num_experts)) & present.reshape(-1, 1))
    if len(bad):
        row, j = bad[0]
        raise ArgumentError(f"topk_ids of rank {row // tokens}, token {row % tokens}, slot {j} is {ids[row, j]}, "
                            f"wanted an expert in 0..{num_experts - 1} or -1 to skip ({len(bad)} such ids in all)")


def _fail(table: str, index: Any, seen: Any, wanted: Any, rule: str) -> None:
    where = ", ".join(str(int(i)) for i in np.atleast_1d(index))
    raise ScheduleError(f"{table}[{where}] is {seen}, wanted {wanted}: {rule}")


def _same(table: str, seen: np.ndarray, wanted: np.ndarray, rule: str) -> None:
    """Raises at the first entry in which the arrays differ, or if their lengths do."""
    if seen.shape != wanted.shape:
        raise ScheduleError(f"{table} has shape {seen.shape}, wanted {wanted.shape}: {rule}")
    different = np.argwhere(seen != wanted)
    if len(different):
        index = tuple(different[0])
        _fail(table, index, seen[index], wanted[index], rule)


def _facts(tables: Tables, counts: np.ndarray, ids: np.ndarray) -> _Facts:
    tokens = tables.tokens_per_rank
    for source, count in enumerate(counts):
        if not 0 <= count <= tokens:
            _fail("token_counts", source, count, f"0..{tokens}", "tokens of a rank, at most the row stride")
    here = local_experts(tables.num_experts, tables.world, tables.rank, tables.mode)
    if here != (tables.first_expert, tables.num_local_experts):
        raise ScheduleError(f"first_expert, num_local_experts are {tables.first_expert}, {tables.num_local_experts}, "
                            f"wanted {here[0]}, {here[1]}: ownership of {tables.num_experts} experts in {tables.mode}")
    t = np.arange(tokens)
    present = (t < counts[:, None]).reshape(-1)
    segment = (t * tables.segments // np.maximum(counts, 1)[:, None]).reshape(-1)
    expert = ids - tables.first_expert
    local = (expert >= 0) & (expert < tables.num_local_experts) & present[:, None]
    group = np.where(local, segment[:, None] * tables.num_local_experts + expert, -1)
    return _Facts(ids, present, segment, local, group, np.bincount(group[local], minlength=tables.num_groups))


def _check_groups(tables: Tables, arrays: dict[str, np.ndarray], facts: _Facts) -> None:
    load = facts.in_group.reshape(tables.segments, tables.num_local_experts).sum(0)
    _same("expert_load", arrays["expert_load"], load, "pairs routed to the local expert")
    offsets, block = arrays["expert_offsets"], tables.row_block
    if offsets[0] != 0:
        _fail("expert_offsets", 0, offsets[0], 0, "the first group starts at slot 0")
    for g in np.flatnonzero(offsets % block)[:1]:
        _fail("expert_offsets", g, offsets[g], f"a multiple of {block}", "a group starts with a row block")
    width = -(-facts.in_group // block) * block
    for g in np.flatnonzero(np.diff(offsets) != width)[:1]:
        _fail("expert_offsets", g + 1, offsets[g + 1], offsets[g] + width[g],
              f"group {g} starts at {offsets[g]} and has {facts.in_group[g]} rows in blocks of {block}")


def _check_slots(tables: Tables, arrays: dict[str, np.ndarray], facts: _Facts) -> None:
    slots, offsets, local = arrays["slots"], arrays["expert_offsets"], facts.local
    for index in np.argwhere(~local & (slots != -1))[:1]:
        _fail("slots", index, slots[tuple(index)], -1, "the pair is masked, invalid, or its expert is not here")
    first = offsets[:-1][facts.group[local]]
    end = first + facts.in_group[facts.group[local]]
    outside = np.flatnonzero((slots[local] < first) | (slots[local] >= end))
    for i in outside[:1]:
        index = np.argwhere(local)[i]
        _fail("slots", index, slots[tuple(index)], f"{first[i]}..{end[i] - 1}",
              f"the rows of group {facts.group[tuple(index)]}")
    by_group = np.argsort(facts.group[local], kind="stable")  # then by pair
    values = slots[local][by_group]
    for i in np.flatnonzero(np.diff(values) <= 0)[:1]:
        index = np.argwhere(local)[by_group[i + 1]]
        before = np.argwhere(local)[by_group[i]]
        _fail("slots", index, values[i + 1], f"a slot above {values[i]}",
              f"unique and ascending in a group: slots[{before[0]}, {before[1]}] comes before")
    wanted = np.full(int(offsets[-1]), -1)
    wanted[slots[local]] = np.flatnonzero(local.reshape(-1))
    _same("slot_pair", arrays["slot_pair"], wanted, "the pair that has this slot; -1 is padding")


def _check_blocks(tables: Tables, arrays: dict[str, np.ndarray]) -> None:
    blocks = np.diff(arrays["expert_offsets"]) // tables.row_block
    _same("block_group", arrays["block_group"], np.repeat(np.arange(tables.num_groups), blocks),
          "the group whose slots the block holds")
    rows = (arrays["slot_pair"].reshape(-1, tables.row_block) >= 0).sum(1)
    _same("block_target", arrays["block_target"], rows, "rows that arrive in the block (padding does not)")


def _check_rows(tables: Tables, arrays: dict[str, np.ndarray]) -> None:
    slots, tokens = arrays["slots"], tables.tokens_per_rank
    rows = np.flatnonzero((slots >= 0).any(1))
    smallest = np.where(slots >= 0, slots, np.iinfo(np.int64).max).min(1)[rows]
    largest = slots.max(1)[rows]
    _same("delivery_order", arrays["delivery_order"], rows[np.argsort(smallest)],
          "rows with work here, each once, by smallest slot")
    _same("job_order", arrays["job_order"], rows[np.argsort(largest)],
          "rows with work here, each once, by largest slot")
    _same("expected", arrays["expected"], np.bincount(rows // max(tokens, 1), minlength=tables.world),
          "rows of this source rank with work here")
    chunk = np.zeros((tables.world, tables.num_chunks), dtype=np.int64)
    np.add.at(chunk, (rows // max(tokens, 1), rows % max(tokens, 1) // tables.job_chunk), 1)
    _same("chunk_expected", arrays["chunk_expected"], chunk, "rows of this (source rank, chunk) with work here")


def _check_sends(tables: Tables, arrays: dict[str, np.ndarray], facts: _Facts) -> None:
    tokens, rank = tables.tokens_per_rank, tables.rank
    own = slice(rank * tokens, (rank + 1) * tokens)
    bits = np.zeros(tokens, dtype=np.int64)
    for there in range(tables.world):
        first, count = local_experts(tables.num_experts, tables.world, there, tables.mode)
        hit = (facts.ids[own] >= first) & (facts.ids[own] < first + count) & facts.present[own][:, None]
        wanted = np.flatnonzero(hit.any(1))
        bits[wanted] |= np.int64(1) << np.int64(there)
        smallest = np.where(hit, facts.ids[own], np.iinfo(np.int64).max).min(1, initial=np.iinfo(np.int64).max)
        wanted = wanted[np.lexsort((wanted, smallest[wanted], facts.segment[own][wanted]))]
        if arrays["send_count"][there] != len(wanted):
            _fail("send_count", there, arrays["send_count"][there], len(wanted), "own tokens that this rank wants")
        padded = np.concatenate([wanted, np.full(tokens - len(wanted), -1)])
        for t in np.flatnonzero(arrays["send_order"][there] != padded)[:1]:
            _fail("send_order", (there, t), arrays["send_order"][there, t], padded[t],
                  "own tokens that the destination wants, by its smallest slot; then -1")
    _same("contributors", arrays["contributors"], bits, "bit d: rank d has work for the token")
