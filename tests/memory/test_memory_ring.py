"""The ring pool and the warm-up of Linear 2: no routing may deadlock. A small machine plays the task list of a launch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_tk.errors import ArgumentError
from moe_tk.memory.geometry import Geometry
from moe_tk.schedule import build_tables, mega_order


def geometry_of(tokens: int, top_k: int, experts: int, segments: int, row_block: int, ring_segments: int = 2) -> Geometry:
    return Geometry(world=1, max_tokens=tokens, top_k=top_k, num_experts=experts, num_local_experts=experts, hidden=8,
                    intermediate=8, out_width=8, dtype="float32", mode="ep", row_block=row_block, segments=segments,
                    ring_segments=ring_segments)


def plays_to_the_end(tables, ring_blocks: int, warmup: int) -> bool:
    """One block per role in a launch of mega, each going as far as it can in turn: whether all finish. The worst case: with more
    blocks per role only more can happen at a time."""
    slots, row_block = tables.slots, tables.row_block
    tasks = mega_order(tables, 1, 1, warmup).tolist()
    arrived, done1, done2, freed = ([0] * tables.num_blocks for _ in range(4))
    target = tables.block_target.tolist()
    to_place = [(int(row), [int(s) for s in slots[row] if s >= 0]) for row in tables.delivery_order]
    jobs = [[int(s) // row_block for s in slots[row] if s >= 0] for row in tables.job_order]
    while to_place or tasks or jobs:
        moved = False
        while to_place:  # a row is placed slot by slot and waits at the first one without room
            pending = to_place[0][1]
            while pending:
                block = pending[0] // row_block
                before = block - ring_blocks
                if before >= 0 and freed[before] < target[before]:
                    break
                arrived[block] += 1
                pending.pop(0)
                moved = True
            if pending:
                break
            to_place.pop(0)
        while tasks:
            phase, _, block, _ = tasks[0]
            ready = arrived[block] == target[block] if phase == 0 else done1[block]
            if not ready:
                break
            (done1 if phase == 0 else done2)[block] = 1
            tasks.pop(0)
            moved = True
        while jobs and all(done2[block] for block in jobs[0]):
            for block in jobs.pop(0):
                freed[block] += 1
            moved = True
        if not moved:
            return False
    return True


@st.composite
def hostile(draw):
    """Routings with segments that are nearly full, nearly empty or empty, and rows whose slots lie far apart."""
    segments = draw(st.integers(2, 6))
    per_segment = draw(st.integers(1, 16))
    experts, row_block = draw(st.integers(2, 5)), draw(st.sampled_from([1, 2, 4]))
    rows = []
    for _ in range(segments):
        kind = draw(st.sampled_from(["full", "few", "none", "random"]))
        far = draw(st.integers(0, per_segment))
        for t in range(per_segment):
            if kind == "full":
                rows.append([0, experts - 1] if t < far else [0, 0])
            elif kind == "few":
                rows.append([draw(st.integers(-1, experts - 1)), -1] if t < 3 else [-1, -1])
            elif kind == "none":
                rows.append([-1, -1])
            else:
                rows.append([draw(st.integers(-1, experts - 1)), draw(st.integers(-1, experts - 1))])
    return torch.tensor(rows), segments, experts, row_block


@settings(max_examples=150, deadline=None)
@given(hostile(), st.sampled_from([2, 3]))
def test_krn_01_no_routing_deadlocks_the_ring(case, ring_segments):
    """With the ring and the warm-up that the geometry allows, every list of roles runs to its end."""
    ids, segments, experts, row_block = case
    geometry = geometry_of(ids.shape[0], 2, experts, segments, row_block, ring_segments)
    tables = build_tables(ids, token_counts=[ids.shape[0]], world=1, rank=0, num_experts=experts, mode="ep", row_block=row_block,
                          segments=segments)
    for warmup in {1, 2, geometry.max_warmup}:
        assert plays_to_the_end(tables, geometry.ring_blocks, min(warmup, geometry.max_warmup))


def nearly_full_around_nearly_empty() -> tuple[Geometry, torch.Tensor]:
    ids = torch.full((64, 2), -1)
    for segment in (0, 2, 3):
        ids[16 * segment:16 * segment + 16] = 0
        ids[16 * segment:16 * segment + 5] = torch.tensor([[0, 3], [0, 1], [0, 2], [0, 3], [0, 3]])
    ids[16:18] = torch.tensor([[0, 1], [2, -1]])
    return geometry_of(64, 2, 4, 4, 4), ids


def test_the_small_machine_finds_the_deadlock_of_a_longer_warm_up():
    """The bound is needed: one segment of warm-up on a ring of two segments, as it once was, stands still on this routing."""
    geometry, ids = nearly_full_around_nearly_empty()
    tables = build_tables(ids, token_counts=[64], world=1, rank=0, num_experts=4, mode="ep", row_block=4, segments=4)
    one = geometry._segment_blocks
    assert not plays_to_the_end(tables, 2 * one, one)
    assert plays_to_the_end(tables, 2 * one, 1)
    assert plays_to_the_end(tables, geometry.ring_blocks, geometry.max_warmup)


def test_a_ring_bounds_the_memory():
    """Row blocks that are held do not grow with the number of segments; without a ring all of a call are."""
    ring, whole = geometry_of(4096, 2, 8, 16, 32), geometry_of(4096, 2, 8, 16, 32, ring_segments=0)
    assert whole.ring_blocks == whole.max_blocks and ring.ring_blocks < whole.ring_blocks / 4
    assert ring.max_warmup >= 8 and whole.max_warmup == whole.max_blocks


def test_a_ring_of_one_segment_is_refused():
    with pytest.raises(ArgumentError, match=r"ring_segments is 1, wanted 0 \(no ring\) or at least 2"):
        geometry_of(64, 2, 4, 4, 4, ring_segments=1)
