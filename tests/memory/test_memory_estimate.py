"""The estimate is what is allocated, byte by byte, over a grid; each size scales as its formula says."""

from __future__ import annotations

import itertools

import pytest
import torch
from backends import each_world
from memory_ranks import SIZES, allocated, allocated_on_gpu

import moe_tk
from moe_tk.memory.geometry import Geometry
from moe_tk.memory.layout import counter_items, end_of, local_items, symmetric_items

GRID = [
    dict(mode=mode, dtype=dtype, pattern=pattern, max_tokens_per_rank=tokens, top_k=top_k, intermediate_size=inter)
    for (mode, dtype), pattern, (tokens, top_k, inter) in itertools.product(
        [("ep", torch.float32), ("tp", torch.bfloat16)], ["auto", "mega", "two_kernel", "serial"],
        [(1, 1, 12), (40, 2, 13), (200, 4, 12), (300, 6, 33)])
]


@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_sym_05_estimate_is_the_allocation(run_ranks, world):
    """64 layers per rank: estimate, workspace, mapped segments and local tensors say the same number of bytes."""
    for results in run_ranks(world, allocated, GRID if world < 8 else GRID[::5]):
        for estimated, claimed, segment, local in results:
            assert estimated == claimed == segment + local


GPU_GRID = [dict(mode=mode, max_tokens_per_rank=tokens, top_k=top_k, intermediate_size=inter, segments=segments)
            for mode, (tokens, top_k, inter, segments) in itertools.product(
                ["ep", "tp"], [(1, 1, 12, None), (40, 2, 13, 4), (4096, 6, 40, 2)])]


@each_world((), (1, 2))
def test_sym_05_estimate_is_the_allocation_on_gpus(run_ranks, backend, world):
    for results in run_ranks(world, allocated_on_gpu, GPU_GRID, backend=backend):
        for estimated, claimed, held in results:
            assert estimated == claimed == held


def test_sym_05_no_factor_is_applied_twice():
    """EP 32, 1024 tokens, k 6, H 7168 in bf16: arrivals and partial rows are one row per (rank, token), 437.5 MiB each."""
    sizes = dict(num_experts=256, top_k=6, hidden_size=7168, intermediate_size=2048, max_tokens_per_rank=1024, dtype="bfloat16")
    estimate = moe_tk.estimate_memory(world=32, **sizes)
    by_name = {item.name: item.bytes for item in (*estimate.symmetric, *estimate.counters, *estimate.local)}
    rows = 32 * 1024 * 7168 * 2
    assert by_name["arrivals"] == by_name["planes"] == rows
    assert by_name["topk_ids"] == by_name["topk_weights"] == 32 * 1024 * 6 * 4
    assert estimate.symmetric_bytes < 2.01 * rows
    # All pairs of all ranks may be local, but of four segments only two are held: half of the pairs, and padding.
    pairs = 32 * 1024 * 6
    assert pairs / 2 * 7168 * 2 <= by_name["gathered"] <= pairs / 2 * 7168 * 2 * 1.15
    halved = moe_tk.estimate_memory(world=16, **sizes)
    assert 1.9 < estimate.symmetric_bytes / halved.symmetric_bytes < 2.1


def test_sym_05_items_add_up_and_are_readable():
    estimate = moe_tk.estimate_memory(world=4, **{**SIZES, "dtype": "float32"})
    items = (*estimate.symmetric, *estimate.counters, *estimate.local)
    assert sum(item.bytes for item in items) <= estimate.total < sum(item.bytes for item in items) + 256 * len(items) + 256
    text = str(estimate)
    for item in items:
        assert not item.bytes or f"{item.bytes:,}" in text and item.name in text
    assert f"{estimate.total:,}" in text.splitlines()[-1]


def test_sym_06_size_follows_the_real_top_k():
    """k = 8 against k = 32: routing tables scale by four, the rest of the heap not at all."""
    small, large = (moe_tk.estimate_memory(world=4, **{**SIZES, "dtype": "float32", "num_experts": 64, "top_k": k})
                    for k in (8, 32))
    for one, other in zip(small.symmetric, large.symmetric, strict=True):
        assert other.bytes == (4 if one.name.startswith("topk") else 1) * one.bytes
    with pytest.raises(TypeError, match="top_k"):
        moe_tk.estimate_memory(**{name: value for name, value in SIZES.items() if name != "top_k"}, world=4)


def test_grf_03_places_follow_from_the_geometry_alone():
    """Regions never overlap, start at multiples of 256, and hold what their shape says."""
    for world, tokens, mode in itertools.product([1, 3, 8], [1, 33, 500], ["ep", "tp"]):
        geometry = Geometry(world=world, max_tokens=tokens, top_k=3, num_experts=9, num_local_experts=4, hidden=24, intermediate=10,
                            out_width=24, dtype="bfloat16", mode=mode, segments=4, ring_segments=2)
        for items in (symmetric_items(geometry), counter_items(geometry), local_items(geometry)):
            end = 0
            for item in items:
                assert item.offset % 256 == 0 and item.offset >= end
                end = item.offset + item.bytes
            assert end <= end_of(items) < end + 256


def test_sym_05_a_layer_says_what_it_takes_before_it_takes_it(nothing_left):
    """A layer that does not fit fails with the numbers, before it has anything."""
    with pytest.raises(moe_tk.CapacityError, match=r"[0-9.]+ MiB (of local buffers|in /dev/shm).*max_tokens_per_rank"):
        moe_tk.MoELayer(**{**SIZES, "hidden_size": 65536, "max_tokens_per_rank": 2**24, "top_k": 1})
