"""Ranks that make wrong, different or missing calls. Imports no pytest: every rank loads this module."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from layer_ranks import Told, attempt, call_and_check, digest
from moe_cases import LayerCase, call, load, moved
from torch import Tensor

from moe_tk.layer import MoELayer
from moe_tk.weights import shard_weights

Inputs = tuple[Any, Any, Any]


def _nan_weight(hidden: Tensor, ids: Tensor, weights: Tensor) -> Inputs:
    weights = weights.clone()
    weights[1, 0] = float("nan")
    return hidden, ids, weights


BAD_INPUTS: dict[str, Callable[[Tensor, Tensor, Tensor], Inputs]] = {
    "swapped": lambda x, ids, w: (x, w, ids),
    "wrong width": lambda x, ids, w: (x[:, :-8], ids, w),
    "wrong dtype": lambda x, ids, w: (x.half(), ids, w),
    "wrong rows": lambda x, ids, w: (x, ids[1:], w),
    "wrong top_k": lambda x, ids, w: (x, ids[:, :-1], w[:, :-1]),
    "nan weight": _nan_weight,
    "not a tensor": lambda x, ids, w: (x.tolist(), ids, w),
    "no tensor of this class": lambda x, ids, w: (type("Größe" * 40, (), {})(), ids, w),
    "sparse": lambda x, ids, w: (x.to_sparse(), ids, w),
    "meta": lambda x, ids, w: (x.to("meta"), ids, w),
    "gradient": lambda x, ids, w: (x.clone().requires_grad_(), ids, w),
}


def refuse_and_go_on(rank: int, world: int, case: LayerCase, kinds: list[str], culprit: int) -> dict[str, Told]:
    """For each kind of bad input: rank `culprit` passes it, the others are right; then all make a right call."""
    layer = case.layer()
    told = {}
    for kind in kinds:
        inputs = case.inputs(0, world, rank)
        given = BAD_INPUTS[kind](*inputs) if rank == culprit else inputs
        told[kind] = attempt(lambda given=given: call(layer, *given))
        call_and_check(layer, case, 0)
    assert int(layer.expert_load.sum()) * len(kinds) > 0 or layer.num_local_experts == 0
    return told


def refuse_weights_missing(rank: int, world: int, case: LayerCase) -> Told:
    """Rank 0 has loaded no weights yet; after it has, calls are right."""
    layer = case.empty_layer()
    weights = shard_weights(*case.weights(), mode=layer.mode, world=world, rank=rank)
    if rank != 0:
        load(layer, *weights)
    told = attempt(lambda: call(layer, *case.inputs(0, world, rank)))
    load(layer, *weights)
    call_and_check(layer, case, 0)
    return told


def overflow(rank: int, world: int, case: LayerCase, counts: tuple[int, ...]) -> Told:
    """A call with counts[rank] tokens, at least one of them too many; before and after it a right call."""
    layer = case.layer()
    before = digest(call_and_check(layer, case, 0))
    loads = layer.expert_load.clone()
    tokens = counts[rank]
    told = attempt(lambda: call(layer, torch.zeros(tokens, case.hidden, dtype=case.dtype),
                                torch.zeros(tokens, case.top_k, dtype=torch.int32), torch.ones(tokens, case.top_k)))
    assert layer.expert_load.equal(loads), "a call that was refused is counted"
    assert digest(call_and_check(layer, case, 0)) == before
    return told


def differ(rank: int, world: int, case: LayerCase, options: list[dict[str, Any]]) -> Told:
    """Every rank makes a layer with its own options (options[rank]) and calls it."""
    layers: list[MoELayer] = []
    told = attempt(lambda: layers.append(case.layer(**options[rank])))
    return attempt(lambda: call(layers[0], *case.inputs(0, world, rank))) if layers else told


def call_in_other_order(rank: int, world: int, case: LayerCase, other: LayerCase) -> Told:
    """Two layers of one workspace (or of two, if `other` has other sizes); rank 0 calls the second first."""
    layers = [case.layer(timeout_s=0.5), other.layer(timeout_s=0.5)]
    for layer, mine in zip(layers, (case, other), strict=True):
        call_and_check(layer, mine, 0)
    chosen = 1 if rank == 0 else 0
    told = attempt(lambda: call(layers[chosen], *(case, other)[chosen].inputs(0, world, rank)))
    if case == other:  # one workspace: nothing was lost
        call_and_check(layers[0], case, 0)
    return told


def never_comes(rank: int, world: int, case: LayerCase, absent: list[int], timeout_s: float, *,
                calls_before: int = 1) -> list[Told]:
    """Ranks `absent` do not make the last call. What the others are told, and what the next call on the layer says then."""
    layer = case.layer(timeout_s=timeout_s)
    for _ in range(calls_before):
        call_and_check(layer, case, 0)
    inputs = case.inputs(0, world, rank)
    if rank in absent:
        time.sleep(timeout_s + 0.5)
        return []
    return [attempt(lambda: call(layer, *inputs)), attempt(lambda: call(layer, *inputs))]


def launches_too_little(rank: int, world: int, case: LayerCase, stopped: int, stages: int, timeout_s: float) -> Told:
    """Rank `stopped` makes only these stages of its call on the CUDA back end (a mask of nvlink_session.OPEN, ...)."""
    layer = case.layer(timeout_s=timeout_s)
    call_and_check(layer, case, 0)
    inputs = [moved(tensor, layer.device) for tensor in case.inputs(0, world, rank)]
    if rank != stopped:
        return attempt(lambda: call(layer, *inputs))
    layer._calls.forward(*inputs, torch.empty_like(inputs[0]), signature=layer._signature, stages=stages)
    time.sleep(timeout_s + 0.5)
    return "stopped", "", 0.0


def stops_inside(rank: int, world: int, case: LayerCase, stopped: int, launch: int, timeout_s: float) -> Told:
    """Rank `stopped` never makes its native launch number `launch` of the call."""
    layer = case.layer(timeout_s=timeout_s)
    native, launches = layer.session.native, 0

    class Stopping:
        """The native part of a rank that stops before one of its launches."""

        def __getattr__(self, name: str) -> Any:
            nonlocal launches
            if name == "launch":
                launches += 1
                if launches > launch:
                    raise KeyboardInterrupt
            return getattr(native, name)

        def abort(self) -> None:  # a process that is stopped tells nobody
            pass

    if rank == stopped:
        layer.session.native = Stopping()
    try:
        return attempt(lambda: layer(*case.inputs(0, world, rank)))
    except KeyboardInterrupt:
        time.sleep(timeout_s + 0.5)
        return "stopped", "", 0.0


def raises_inside(rank: int, world: int, case: LayerCase, culprit: int) -> list[Told]:
    """Rank `culprit` raises between exchange and launch: the others hear of it at once, not after the time limit."""
    layer = case.layer(timeout_s=20.0)
    native = layer.session.native

    class Raising:
        """The native part of a rank whose launch fails."""

        def __getattr__(self, name: str) -> Any:
            if name == "launch":
                raise MemoryError("no memory for the launch")
            return getattr(native, name)

    if rank == culprit:
        layer.session.native = Raising()
    inputs = case.inputs(0, world, rank)
    try:
        first = attempt(lambda: layer(*inputs))
    except MemoryError as error:
        first = ("MemoryError", str(error), 0.0)
    return [first, attempt(lambda: layer(*inputs))]


def overlapping_calls(rank: int, world: int, case: LayerCase) -> list[Told]:
    """Two threads call at the same time while the first call is held up by a late rank; then all go on."""
    layers = [case.layer(), case.layer()]  # two layers of one workspace
    inputs = case.inputs(0, world, rank)
    told: list[Told] = []
    if rank == 0:
        started = threading.Thread(target=lambda: call_and_check(layers[0], case, 0))
        started.start()
        while not layers[0].session._lock.locked():
            time.sleep(0.001)
        told = [attempt(lambda: layers[0](*inputs)), attempt(lambda: layers[1](*inputs))]
        started.join()
    else:
        time.sleep(0.5)
        call_and_check(layers[0], case, 0)
    call_and_check(layers[1], case, 0)
    return told


def call_after_slow_start(rank: int, world: int, case: LayerCase, sleep_s: float, timeout_s: float) -> Told:
    """Rank 0 sleeps before its first call, as if it compiled something."""
    layer = case.layer(timeout_s=timeout_s)
    if rank == 0:
        time.sleep(sleep_s)
    return attempt(lambda: call_and_check(layer, case, 0))


def skip_when_empty(rank: int, world: int, case: LayerCase) -> Told:
    """The last rank has no tokens and thinks that it need not call."""
    layer = case.layer(timeout_s=0.5)
    if rank == world - 1:
        time.sleep(1.0)
        return "skipped", "", 0.0
    return attempt(lambda: call(layer, *case.inputs(0, world, rank)))
