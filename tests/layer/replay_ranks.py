"""Ranks that replay calls with frozen arguments, as a CUDA graph would. Imports no pytest: every rank loads this module."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from layer_ranks import call_and_check
from moe_cases import LayerCase, digest, meet, poison
from torch import Tensor

from moe_tk.layer import MoELayer
from moe_tk.runtime import calls
from moe_tk.runtime.session import Session


@dataclass
class Capture:
    """One recorded call: the arguments of its native steps, and the tensors behind the addresses in them."""

    layer: MoELayer
    tensors: tuple[Tensor, Tensor, Tensor]
    out: Tensor
    steps: list[tuple[str, dict]] = field(default_factory=list)
    alive: list[Any] = field(default_factory=list)

    def replay(self) -> Tensor:
        """The native steps again, with the very same arguments and nothing else."""
        for name, arguments in self.steps:
            result = getattr(self.layer.session.native, name)(**arguments)
            assert result is not None and (name == "exchange" or result["ok"])
        return self.out


class _Recorder:
    """Stands for the native part and notes what it is called with."""

    def __init__(self, native: Any, capture: Capture) -> None:
        self._native, self._capture = native, capture

    def __getattr__(self, name: str) -> Any:
        step = getattr(self._native, name)
        if name not in ("exchange", "launch"):
            return step

        def noted(**arguments: Any) -> Any:
            self._capture.steps.append((name, arguments))
            return step(**arguments)

        return noted


def capture(layer: MoELayer, tensors: tuple[Tensor, Tensor, Tensor]) -> Capture:
    """Makes one eager call and records it."""
    session = layer.session
    taken = Capture(layer, tensors, torch.empty_like(tensors[0]))
    native, launch, open_call = session.native, calls.OpenCall.launch, Session.open_call

    def keep_launch(self: Any, pattern: str, tasks: Tensor, buffers: Any, **named: Any) -> None:
        taken.alive.append((self, tasks, buffers))
        launch(self, pattern, tasks, buffers, **named)

    def keep_open_call(self: Any, header: Any, **named: Any) -> Any:
        taken.alive.append(named)
        return open_call(self, header, **named)

    session.native = _Recorder(native, taken)
    calls.OpenCall.launch, Session.open_call = keep_launch, keep_open_call
    try:
        layer(*tensors, out=taken.out)
    finally:
        session.native, calls.OpenCall.launch, Session.open_call = native, launch, open_call
    return taken


def scalars(taken: Capture) -> list[dict]:
    """The arguments of each step that are no addresses."""
    flat = []
    for _, arguments in taken.steps:
        for values in (arguments, arguments.get("launch", {}), arguments.get("schedule", {})):
            flat.append({name: value for name, value in values.items()
                         if not isinstance(value, dict) and not (isinstance(value, int) and value > 2**32)})
    return flat


def refill(taken: Capture, generator: torch.Generator, new_weights: bool) -> None:
    hidden, _, weights = taken.tensors
    hidden.copy_(torch.randn(hidden.shape, generator=generator))
    if new_weights:
        weights.copy_(torch.rand(weights.shape, generator=generator))


def eager(taken: Capture) -> str:
    return digest(taken.layer(*taken.tensors))


def replay_one(rank: int, world: int, case: LayerCase, replays: int) -> tuple[int, int]:
    """Captures each epoch of the case at full size and replays it with new inputs; (epoch counter before, after) the replays.

    At full size even the routing weights are read where the exchange leaves them, so they may change too.
    """
    layer = case.layer()
    chance = random.Random(5)
    captures = []
    for epoch in range(len(case.counts)):
        hidden, ids, weights = case.inputs(epoch, world, rank)
        captures.append(capture(layer, (hidden, ids, weights.float())))
    again = capture(layer, captures[0].tensors)
    assert scalars(again) == scalars(captures[0]), "a number changed from one call to the next: it belongs into memory"
    before = layer.session.native.epoch
    generator = torch.Generator().manual_seed(rank)
    done = 0
    for turn in range(replays):
        taken = captures[turn % len(captures)]
        refill(taken, generator, new_weights=min(case.counts[turn % len(captures)]) == case.max_tokens)
        dist.barrier()
        poison(layer)
        taken.out.fill_(float("nan"))
        dist.barrier()
        late, delay = chance.randrange(world), chance.random() * 0.02
        if rank == late:
            time.sleep(delay)
        replayed = digest(taken.replay())
        done += 1
        assert replayed == eager(taken), f"replay {turn} is not what an eager call gives"
        done += 1
    assert layer.session.native.epoch == before + done
    return before, layer.session.native.epoch


def replay_mixed(rank: int, world: int, case: LayerCase, turns: int) -> None:
    """Captures of different sizes on one layer, replayed in random order between eager calls of all sizes."""
    layer = case.layer()
    captures = [capture(layer, case.inputs(epoch, world, rank)) for epoch in range(len(case.counts))]
    places = dict(layer.session.workspace.heap_fields())
    chance, generator = random.Random(11), torch.Generator().manual_seed(rank)
    for _ in range(turns):
        taken = captures[chance.randrange(len(captures))]
        refill(taken, generator, new_weights=False)
        replayed = digest(taken.replay())
        assert replayed == eager(taken)
        if chance.random() < 0.3:
            call_and_check(layer, case, chance.randrange(len(captures)))
    assert layer.session.workspace.heap_fields() == places


def cross_the_wrap(rank: int, world: int, case: LayerCase, start: int) -> int:
    """Sets the epoch and all counters of all ranks just below 2^32 and runs all epochs of the case twice."""
    layer = case.layer()
    workspace = layer.session.workspace
    near = start - 2**32
    for name in ("posted", "done", "sent", "combined"):
        item = workspace._symmetric[name]
        workspace.heap.tensor(rank, item.offset, (item.bytes // 4,), torch.int32).fill_(near)
    for item in workspace._counters.values():
        if item.item_bytes == 4:
            workspace._counter_bytes[item.offset:item.offset + item.bytes].view(torch.int32).fill_(near)
    dist.barrier()
    for epoch in [*range(len(case.counts))] * 2:
        call_and_check(layer, case, epoch)
    return layer.session.native.epoch


def cross_the_wrap_on_gpus(rank: int, world: int, case: LayerCase, start: int) -> int:
    """cross_the_wrap for the CUDA back end, whose epoch and flags are words of device memory; the epoch at the end."""
    layer = case.layer()
    workspace = layer.session.workspace
    workspace.local("epoch").fill_(start - 2**32)
    for name in ("posted", "rows_posted", "combined"):
        workspace.region(name, torch.int32).fill_(start - 2**32)
    meet(layer)
    for epoch in [*range(len(case.counts))] * 2:
        call_and_check(layer, case, epoch)
    return int(workspace.local("epoch")[0])


def refresh_on_gpus(rank: int, world: int, case: LayerCase, start: int) -> set[int]:
    """Watermarks that seem to be ahead, as those of chunks without work for 2^31 calls would; the watermarks after the one call
    that refreshes them, by distance from its epoch."""
    layer = case.layer()
    workspace = layer.session.workspace
    workspace.local("epoch").fill_(start)
    for name, value in (("posted", start), ("rows_posted", start), ("combined", start + 1000)):
        workspace.region(name, torch.int32).fill_(value)
    meet(layer)
    call_and_check(layer, case, 0)
    meet(layer)
    return {value - start - 1 for value in workspace.region("combined", torch.int32).tolist()}
