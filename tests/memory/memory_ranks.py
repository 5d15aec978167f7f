"""What the ranks of the memory tests do. Imports no pytest: every rank loads this module."""

from __future__ import annotations

import os
import time
from typing import Any

import torch
from moe_cases import call, load

import moe_tk
from moe_tk.errors import MoETkError
from moe_tk.group import resolve_group
from moe_tk.layer import MoELayer
from moe_tk.memory import shm, workspace
from moe_tk.memory.geometry import Geometry
from moe_tk.memory.workspace import Workspace
from moe_tk.runtime import session as sessions
from moe_tk.runtime import watch

SIZES = dict(num_experts=6, top_k=2, hidden_size=16, intermediate_size=12, max_tokens_per_rank=40, dtype=torch.float32)
SIZES_OF = {"cpu": SIZES, "cuda": {**SIZES, "dtype": torch.bfloat16, "protocol": "nvlink"}}
SMALL = Geometry(world=1, max_tokens=8, top_k=2, num_experts=4, num_local_experts=4, hidden=16, intermediate=8, out_width=16,
                 dtype="float32", mode="tp")


def allocated(rank: int, world: int, grid: list[dict[str, Any]]) -> list[tuple[int, int, int, int]]:
    """For each layer: estimated bytes, bytes its workspace says, bytes of the mapped segment, bytes of the local tensors."""
    results = []
    for changed in grid:
        layer = MoELayer(**{**SIZES, **changed})
        estimate = moe_tk.estimate_memory(world=world, rank=rank, **{**SIZES, **changed})
        made = layer.session.workspace
        assert len(made.heap._maps) == world and all(len(segment) == made.heap.size for segment in made.heap._maps)
        local = made._counter_bytes.untyped_storage().nbytes() + made._local_bytes.untyped_storage().nbytes()
        assert str(estimate) == str(layer.memory)
        results.append((estimate.total, made.allocated_bytes, len(made.heap._maps[rank]), local))
        del layer, made
    return results


def allocated_on_gpu(rank: int, world: int, grid: list[dict[str, Any]]) -> list[tuple[int, int, int]]:
    """For each layer of the CUDA back end: estimated bytes, bytes its workspace says, bytes of its tensors."""
    results = []
    for changed in grid:
        layer = MoELayer(**{**SIZES_OF["cuda"], **changed})
        made = layer.session.workspace
        assert len(made.heap.bases) == world
        buffers = {buffer.data_ptr(): buffer for buffer, _ in made._local.values()}
        held = made.heap._views[rank].numel() + sum(buffer.untyped_storage().nbytes() for buffer in buffers.values())
        results.append((layer.memory.total, made.allocated_bytes, held))
        del layer, made
    return results


def told(make: Any) -> tuple[str, str, float]:
    """What making something raised: class, text, seconds."""
    begin = time.monotonic()
    try:
        make()
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - begin
    return "none", "", time.monotonic() - begin


def other_order(rank: int, world: int) -> tuple[str, str, float]:
    """Workspaces of one size; the ranks free different ones and then make a new one with the generation they think is next."""
    from dataclasses import replace

    geometry = replace(SMALL, world=world)
    group = resolve_group(None)
    first = Workspace(group, geometry, generation=1, timeout_s=5.0)
    second = Workspace(group, geometry, generation=2, timeout_s=5.0)
    (first if rank == 0 else second).close()
    return told(lambda: Workspace(group, geometry, generation=3 if rank == 0 else 2, timeout_s=5.0))


def windows_match(rank: int, world: int, backend: str) -> list[int]:
    """Layers made and dropped in different orders on the ranks; then a layer for which every rank must map the same windows."""
    sizes = SIZES_OF[backend]
    ids = torch.arange(10, dtype=torch.int32).reshape(5, 2) % 6
    kept = [MoELayer(**sizes), MoELayer(**sizes, weight_position="combine"), MoELayer(**{**sizes, "max_tokens_per_rank": 41})]
    del kept[0 if rank == 0 else 2]
    generations = []
    for tokens in (41, 40):  # one of these workspaces has gone on one rank only
        layer = MoELayer(**{**sizes, "max_tokens_per_rank": tokens})
        load(layer, torch.ones(layer.num_local_experts, 24, 16, dtype=layer.dtype),
             torch.ones(layer.num_local_experts, 16, 12, dtype=layer.dtype))
        out = call(layer, torch.full((5, 16), 0.25, dtype=layer.dtype), ids, torch.full((5, 2), 0.5))
        assert bool(torch.isfinite(out).all()) and bool((out == out[0, 0]).all()) and float(out[0, 0]) > 0
        generations.append(layer.session.generation)
    return generations


def fails_in_set_up(rank: int, world: int, place: str, culprit: int) -> list[tuple[str, str, float]]:
    """Rank `culprit` fails at one place of the set-up of a layer; what every rank is told, and that the next layer can be made."""
    def boom(*_: Any, **__: Any) -> Any:
        raise OSError(28, "No space left on device") if place in ("reserve", "create", "map") else RuntimeError(f"boom in {place}")

    patches = {"create": (os, "open"), "reserve": (os, "posix_fallocate"), "map": (shm.mmap, "mmap"),
               "local": (workspace, "_buffer"), "build": (sessions, "host_module"), "bind": (Workspace, "heap_fields"),
               "pipe": (watch.os, "pipe")}
    owner, name = patches[place]
    before = getattr(owner, name)
    if rank == culprit:
        setattr(owner, name, boom)
    try:
        first = told(lambda: MoELayer(**SIZES))
    finally:
        setattr(owner, name, before)
    return [first, told(lambda: MoELayer(**SIZES))]


def fails_in_set_up_on_gpu(rank: int, world: int, place: str, culprit: int) -> list[tuple[str, str, float]]:
    """fails_in_set_up for the CUDA back end; the next layer is called too."""
    import torch.distributed._symmetric_memory as symmetric

    from moe_tk.memory import nvlink
    from moe_tk.runtime import nvlink_session

    def boom(*_: Any, **__: Any) -> Any:
        if place == "segment":
            raise torch.cuda.OutOfMemoryError("CUDA out of memory, boom")
        raise RuntimeError(f"boom in {place}")

    patches = {"build": (nvlink_session, "nvlink_module"), "segment": (symmetric, "empty"),
               "local": (nvlink.NvlinkWorkspace, "_allocate_local"), "bind": (nvlink.NvlinkWorkspace, "fields"),
               "pipe": (watch.os, "pipe")}
    owner, name = patches[place]
    before = getattr(owner, name)
    if rank == culprit:
        setattr(owner, name, boom)
    try:
        first = told(lambda: MoELayer(**SIZES_OF["cuda"]))
    finally:
        setattr(owner, name, before)
    return [first, told(lambda: call_once(MoELayer(**SIZES_OF["cuda"])))]


def call_once(layer: MoELayer) -> None:
    load(layer, torch.zeros(layer.num_local_experts, 24, 16, dtype=layer.dtype),
         torch.zeros(layer.num_local_experts, 16, 12, dtype=layer.dtype))
    out = call(layer, torch.ones(5, 16, dtype=layer.dtype), torch.zeros(5, 2, dtype=torch.int32), torch.ones(5, 2))
    assert bool((out == 0).all())


def too_much(rank: int, world: int, tokens: int) -> tuple[str, str, float]:
    """A layer for more tokens than /dev/shm has room for."""
    return told(lambda: MoELayer(**{**SIZES, "hidden_size": 8192, "max_tokens_per_rank": tokens}))


def dies_before_mapping(rank: int, world: int) -> str:
    """Rank 1 is killed right after it made its segment; the others must not wait for it, and its segment must not stay for ever."""
    if rank == 1:
        def die(*_: Any) -> None:
            os.kill(os.getpid(), 9)

        shm.ShmHeap._reserve = die
    outcome = told(lambda: MoELayer(**SIZES))
    shm.remove_stale_segments()
    return outcome[0]


def generation_after_error(rank: int, world: int) -> str:
    """MoETkError of two ranks that ask for different layers; then the same layer on both."""
    text = told(lambda: MoELayer(**{**SIZES, "hidden_size": 16 + 8 * rank}))[1]
    assert told(lambda: MoELayer(**SIZES))[0] == "none"
    assert issubclass(MoETkError, Exception)
    return text
