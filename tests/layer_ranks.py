"""What the ranks of the layer tests do. Imports no pytest: every rank loads this module."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from moe_cases import LayerCase, call, check_each, check_result, device_of, digest, expected, meet, poison

from moe_tk.errors import MoETkError
from moe_tk.layer import MoELayer
from moe_tk.planner import plan

Told = tuple[str, str, float]  # class of the exception, its text, seconds until it came


def attempt(action: Callable[[], Any]) -> Told:
    """What it raised, and when; ("none", "", seconds) if it raised nothing."""
    begin = time.monotonic()
    try:
        action()
    except MoETkError as error:
        return type(error).__name__, str(error), time.monotonic() - begin
    return "none", "", time.monotonic() - begin


def make_layer(rank: int, world: int, case: LayerCase, *, late_s: float = 0.0, **options: Any) -> Told:
    """What making the layer raised; rank 0 comes late_s seconds after the others."""
    if rank == 0:
        time.sleep(late_s)
    return attempt(lambda: case.layer(**options))


def call_and_check(layer: MoELayer, case: LayerCase, epoch: int, group: Any = None) -> torch.Tensor:
    """One call on clean inputs, compared with the reference."""
    rank, world = layer.group.rank, layer.group.world
    inputs = case.inputs(epoch, world, rank)
    got = call(layer, *inputs)
    check_result(got, expected(case, layer, inputs), inputs[1], case.num_experts, case.dtype)
    return got


def run_epochs(rank: int, world: int, case: LayerCase, *, delay_seed: int = 0, repeats: int = 1, **options: Any) -> list[str]:
    """Runs all epochs of a case on one layer object: poisoned memory, one rank late in each epoch. Digests of the results."""
    layer = case.layer(**options)
    chance = random.Random(delay_seed)
    digests = []
    for epoch in list(range(len(case.counts))) * repeats:
        hidden, ids, weights = inputs = case.inputs(epoch, world, rank)
        out = torch.full_like(hidden, float("nan"))
        meet(layer)
        poison(layer)
        meet(layer)
        late, delay = chance.randrange(world), chance.random() * 0.03
        if rank == late:
            time.sleep(delay)
        given = call(layer, *inputs, out=out) if epoch % 2 else call(layer, *inputs)
        assert not epoch % 2 or given is out
        check_result(given, expected(case, layer, inputs), ids, case.num_experts, case.dtype)
        digests.append(digest(given))
    return digests


def run_back_to_back(rank: int, world: int, case: LayerCase, calls: int, **options: Any) -> list[str]:
    """Many calls with nothing between them; the digests of the results, one per epoch of the case."""
    layer = case.layer(**options)
    inputs = [case.inputs(epoch, world, rank) for epoch in range(len(case.counts))]
    first: dict[int, str] = {}
    for number in range(calls):
        epoch = number % len(inputs)
        got = call(layer, *inputs[epoch])
        if epoch not in first:
            check_result(got, expected(case, layer, inputs[epoch]), inputs[epoch][1], case.num_experts, case.dtype)
        assert first.setdefault(epoch, digest(got)) == digest(got), f"call {number} differs from the first of its kind"
    return [first[epoch] for epoch in sorted(first)]


def run_delayed_steps(rank: int, world: int, case: LayerCase, step: str, late: int) -> list[str]:
    """All epochs with rank `late` sleeping before each native step named `step` ("exchange" | "launch")."""
    layer = case.layer()
    native = layer.session.native

    class Slow:
        """The native part with a nap before one of its steps."""

        def __getattr__(self, name: str) -> Any:
            if name == step and rank == late:
                time.sleep(0.02)
            return getattr(native, name)

    layer.session.native = Slow()
    return [digest(call_and_check(layer, case, epoch)) for epoch in range(len(case.counts))]


def send_counts(rank: int, world: int, case: LayerCase, epoch: int, **options: Any) -> tuple[list[int], list[int], list[int]]:
    """(bytes dispatched, bytes combined, load of the local experts) of one call on this rank."""
    layer = case.layer(**options)
    call_and_check(layer, case, epoch)
    return layer.stats.bytes_dispatched, layer.stats.bytes_combined, layer.expert_load.tolist()


def loads(rank: int, world: int, case: LayerCase, epoch: int, **options: Any) -> list[int]:
    """Load of the local experts after one call."""
    layer = case.layer(**options)
    call_and_check(layer, case, epoch)
    return layer.expert_load.tolist()


def run_in_canaries(rank: int, world: int, case: LayerCase) -> int:
    """All epochs with the bytes between the regions of all buffers watched; returns how many bytes those are."""
    layer = case.layer()
    gaps = [gap for items, buffer in regions_of(layer) for gap in gaps_between(items, buffer)]
    for gap in gaps:
        gap.fill_(0xA5)
    meet(layer)
    for epoch in range(len(case.counts)):
        call_and_check(layer, case, epoch)
    meet(layer)
    assert all(bool((gap == 0xA5).all()) for gap in gaps), "something was written between two regions"
    return sum(gap.numel() for gap in gaps)


def regions_of(layer: MoELayer) -> list[tuple[dict, torch.Tensor]]:
    """(items by name, bytes) of each buffer of the layer's workspace on this rank."""
    workspace = layer.session.workspace
    heap = workspace.heap.tensor(layer.group.rank, 0, (workspace.heap.size,), torch.uint8)
    if device_of(layer).type == "cpu":
        return [(workspace._symmetric, heap), (workspace._counters, workspace._counter_bytes),
                (workspace._local, workspace._local_bytes)]
    buffers = {buffer.data_ptr(): buffer for buffer, _ in workspace._local.values()}
    return [(workspace._symmetric, heap), *(
        ({name: item for name, (held, item) in workspace._local.items() if held.data_ptr() == address}, buffer)
        for address, buffer in buffers.items())]


def gaps_between(items: dict, buffer: torch.Tensor) -> list[torch.Tensor]:
    """The alignment bytes behind each region of a buffer."""
    starts = [item.offset for item in items.values()][1:] + [buffer.numel()]
    gaps = [buffer[item.offset + item.bytes:start] for item, start in zip(items.values(), starts, strict=True)]
    return [gap for gap in gaps if gap.numel()]


def compare_routings(rank: int, world: int, case: LayerCase, replace_id: int, **options: Any) -> None:
    """The result for ids with one hostile value is, bit by bit, the result with -1 in its place."""
    layer = case.layer(**options)
    hidden, ids, weights = case.inputs(0, world, rank)
    ids = ids.long()
    clean = ids.clone()
    if rank == 1:
        ids[3, 1], clean[3, 1] = replace_id, -1
    got, wanted = call(layer, hidden, ids, weights), call(layer, hidden, clean, weights)
    assert digest(got) == digest(wanted)
    check_result(got, expected(case, layer, (hidden, clean, weights)), clean, case.num_experts, case.dtype)


@contextmanager
def tiles(row_block: int, column_block: int, job_chunk: int) -> Iterator[None]:
    """Layers made inside get tiles and chunks of these sizes, so that few tokens make many of them."""
    names = ("ROW_BLOCK", "COLUMN_BLOCK", "JOB_CHUNK")
    before = [getattr(plan, name) for name in names]
    for name, value in zip(names, (row_block, column_block, job_chunk), strict=True):
        setattr(plan, name, value)
    try:
        yield
    finally:
        for name, value in zip(names, before, strict=True):
            setattr(plan, name, value)


def run_any(rank: int, world: int, case: LayerCase, sizes: tuple[int, int, int], ids: list[list[list[int]]]) -> list[str]:
    """A case of the property tests: epoch by epoch the ids of all ranks, ids[epoch] being [R * T, k] with T its largest count."""
    with tiles(*sizes):
        layer = case.layer(timeout_s=10.0)
    digests = []
    for epoch, all_ids in enumerate(ids):
        hidden, _, weights = case.inputs(epoch, world, rank)
        stride = max(case.counts[epoch])
        first = rank * stride
        mine = torch.tensor(all_ids, dtype=torch.int64).reshape(-1, case.top_k)[first:first + case.counts[epoch][rank]]
        meet(layer)
        poison(layer)
        meet(layer)
        got = call(layer, hidden, mine, weights)
        check_each(got, case, layer, (hidden, mine, weights))
        digests.append(digest(got))
    return digests
