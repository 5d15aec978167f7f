"""Ranks with process groups of all kinds. Imports no pytest: every rank loads this module."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from layer_ranks import Told, attempt, call_and_check
from moe_cases import LayerCase, meet
from ranks import leftovers
from torch.distributed.device_mesh import init_device_mesh

import moe_tk


def in_subgroup(rank: int, world: int, case: LayerCase, members: list[int]) -> Any:
    """The members make a layer over their group and run it; the others are told that they are none."""
    group = dist.new_group(members)
    try:
        if rank not in members:
            return attempt(lambda: case.layer(group))
        layer = case.layer(group)
        for epoch in range(len(case.counts)):
            call_and_check(layer, case, epoch)
        return layer.group.world, layer.group.rank
    finally:
        if rank in members:
            moe_tk.ops.release_ops_memory()
            dist.destroy_process_group(group)


def in_meshes(rank: int, world: int, case: LayerCase) -> Told:
    """A layer over a one-dimensional mesh, over a row of a two-dimensional one, and the refusal of two dimensions."""
    kind = case.backend
    line = init_device_mesh(kind, (world,))
    call_and_check(case.layer(line), case, 0)
    grid = init_device_mesh(kind, (2, world // 2), mesh_dim_names=("data", "expert"))
    if kind == "cpu":  # rows of a CUDA mesh have NCCL only
        layer = case.layer(grid["expert"])
        assert layer.group.world == world // 2 and layer.group.rank == rank % (world // 2)
        call_and_check(layer, case, 0)
    return attempt(lambda: case.layer(grid))


def two_groups_at_once(rank: int, world: int, case: LayerCase) -> None:
    """World 4 as two groups of two that call at their own pace, beside a layer over all four."""
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    everyone, half = case.layer(), case.layer(halves[rank // 2])
    for _ in range(3 if rank < 2 else 1):
        call_and_check(half, case, 0)
    call_and_check(everyone, case, 0)


def rebuild_group(rank: int, world: int, case: LayerCase, folder: str, lives: int) -> list[tuple[int, int]]:
    """Destroys the process group and makes it anew, `lives` times, with layers and ops in each life.

    (file descriptors, mapped segments) after each life. Odd lives leave the layer to the garbage collector, even ones keep it
    past the end of its group.
    """
    seen, kept = [], []
    for life in range(lives):
        if life:
            store = dist.FileStore(f"{folder}/store{life}", world)
            dist.init_process_group("gloo" if case.backend == "cpu" else "cpu:gloo,cuda:nccl", store=store, rank=rank,
                                    world_size=world, timeout=timedelta(seconds=30))
        layer = case.layer()
        for epoch in range(len(case.counts)):
            call_and_check(layer, case, epoch)
        if case.backend == "cpu":
            x = torch.full((3, 8), float(rank + life))
            gathered = moe_tk.ops.ag_gemm(x, torch.eye(8))
            assert gathered.equal(torch.cat([torch.full((3, 8), float(r + life)) for r in range(world)]))
        kept = [layer] if life % 2 else []
        meet(layer)
        del layer
        dist.destroy_process_group()
        if life % 2 == 0:
            assert leftovers() == []
        maps = Path("/proc/self/maps").read_text().count("/dev/shm/moe_tk.")
        seen.append((len(os.listdir("/proc/self/fd")), maps))
    del kept
    assert leftovers() == []
    return seen


def subgroups_that_come_and_go(rank: int, world: int) -> int:
    """Ops on a new group each time, which is destroyed after: how many mapped segments the last one finds."""
    for _ in range(4):
        group = dist.new_group([0, 1])
        assert moe_tk.ops.ag_gemm(torch.ones(2, 8), torch.eye(8), group=group).shape == (4, 8)
        maps = Path("/proc/self/maps").read_text().count("/dev/shm/moe_tk.")
        dist.destroy_process_group(group)
    return maps


def rebuilt_layers(rank: int, world: int, case: LayerCase) -> tuple[int, int]:
    """Layers of one geometry share a workspace; it goes with the last of them. (sessions alive with two, with none)"""
    import gc

    if case.backend == "cpu":
        from moe_tk.runtime.session import _live
    else:
        from moe_tk.runtime.nvlink_session import _live

    first, second = case.layer(), case.layer()
    assert first.session is second.session and (first.ordinal, second.ordinal) == (1, 2)
    other = case.layer(weight_position="combine")
    assert other.session is first.session
    call_and_check(first, case, 0)
    call_and_check(other, case, 0)
    call_and_check(second, case, 0)
    alive = len(_live)
    del first, second, other
    gc.collect()
    return alive, len(_live)
