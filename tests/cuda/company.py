"""What the ranks do in tests of a layer that is not alone: other streams, other layers, graphs, another allocator, a dying peer."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

import moe_tk
from moe_tk.errors import PeerLost
from moe_tk.group import resolve_group
from tests.cuda.checks import BUDGET, SMALL, Case, Data, Ranks

ODD = Case(256, 3, 31, (256, 100), hidden=520, inter=136)  # experts that do not divide by the world


def loaded(case: Case, ranks: Ranks, **options) -> tuple[moe_tk.MoELayer, Data]:
    """The layer of a case with its weights; options of the case or of the layer."""
    case = replace(case, **{name: options.pop(name) for name in list(options) if hasattr(case, name)})
    layer, data = case.layer(ranks, **options), Data(case, ranks)
    data.load(layer)
    return layer, data


def _beside(ranks: Ranks, start_work, busy_ranks: tuple[int, ...], reserve_sms: int) -> None:
    """20 calls while `start_work()` has put work on other streams of these ranks: right, and no time-out."""
    layer, data = loaded(SMALL, ranks, reserve_sms=reserve_sms)
    args = data.mine()
    alone = layer(*args)
    layer.synchronize()
    ranks.meet()
    ends = start_work() if ranks.rank in busy_ranks else []
    with torch.cuda.stream(torch.cuda.Stream(ranks.device)):
        outs = [layer(*args) for _ in range(20)]
        assert not ends or not all(end.query() for end in ends), "the other work was over before the calls were launched"
        layer.synchronize()
    torch.cuda.synchronize()
    assert data.error(alone, args) <= BUDGET
    assert all(torch.equal(out, alone) for out in outs)


def beside_matrix_products(ranks: Ranks) -> None:
    """Large matrix products take all multiprocessors again and again, on all ranks or on one of them (KRN-03)."""
    a = torch.randn(8192, 8192, device=ranks.device).bfloat16()
    b = torch.mm(a, a)

    def start() -> list[torch.cuda.Event]:
        with torch.cuda.stream(torch.cuda.Stream(ranks.device)):
            for _ in range(30):
                torch.mm(a, a, out=b)
            end = torch.cuda.Event()
            end.record()
        return [end]

    for busy in ((0, 1), (0,)):
        for reserve in (0, 16):
            _beside(ranks, start, busy, reserve)


def beside_sleepers(ranks: Ranks) -> None:
    """Kernels of one block sit on several multiprocessors for longer than all the calls together take (KRN-03)."""
    def start() -> list[torch.cuda.Event]:
        ends = []
        for _ in range(8):
            with torch.cuda.stream(torch.cuda.Stream(ranks.device)):
                torch.cuda._sleep(400_000_000)  # cycles
                ends.append(torch.cuda.Event())
                ends[-1].record()
        return ends

    for reserve in (0, 16):
        _beside(ranks, start, (0, 1), reserve)


def first_call_in_a_capture(ranks: Ranks) -> None:
    """Nothing has been called before; both row blocks are launched for the first time inside captures (GRF-05). Eager calls do not
    wait for the GPU either."""
    layer, data = loaded(SMALL, ranks)
    for count in (8, 512):
        args = data.mine(count)
        out = torch.full((count, SMALL.hidden), float("nan"), device=ranks.device, dtype=torch.bfloat16)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            layer(*args, out=out)
        assert out.isnan().all()
        for _ in range(2):
            graph.replay()
            layer.synchronize()
            assert data.error(out, args) <= BUDGET
            out.fill_(float("nan"))
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            eager = layer(*args)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        layer.synchronize()
        assert data.error(eager, args) <= BUDGET


def another_mode_after_the_capture(ranks: Ranks) -> None:
    """A graph is what was captured, whatever Python switches later, and whatever other layers of the workspace do (GRF-06)."""
    layer, data = loaded(SMALL, ranks)
    other, _ = loaded(SMALL, ranks, weight_position="combine", row_block=64)
    assert other.session is layer.session
    args = data.mine()
    wanted = layer(*args)
    out = torch.empty_like(wanted)
    layer.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layer(*args, out=out)
    for switch in (lambda: setattr(layer._calls, "row_block", 64), lambda: setattr(layer._calls, "segments", 1),
                   lambda: setattr(layer._calls, "weights_before_l2", False), lambda: other(*args)):
        switch()
        out.fill_(float("nan"))
        graph.replay()
        layer.synchronize()
        assert torch.equal(out, wanted)
    changed = layer(*args)
    layer.synchronize()
    assert data.error(changed, args) <= BUDGET and not torch.equal(changed, wanted)


def expandable_segments(ranks: Ranks) -> None:
    """The caching allocator is set to memory that no other process can map: weights and tokens lie there, not the heap (SYM-01)."""
    torch.cuda.empty_cache()
    torch.cuda.memory._set_allocator_settings("expandable_segments:True")
    try:
        layer, data = loaded(SMALL, ranks)
        args = data.mine()
        assert any(segment["is_expandable"] for segment in torch.cuda.memory_snapshot())
        out = layer(*args)
        layer.synchronize()
        assert data.error(out, args) <= BUDGET
    finally:
        torch.cuda.memory._set_allocator_settings("expandable_segments:False")


def several_groups_and_geometries(ranks: Ranks) -> None:
    """Three groups of the same ranks, two geometries, two layers on each workspace, called in random order without a pause."""
    groups = [None, *(dist.new_group(list(range(ranks.world))) for _ in range(2))]
    made = []
    for group in groups:
        for case in (SMALL, ODD):
            for position in ("before_l2", "combine"):
                layer, data = loaded(case, _in_group(ranks, group), weight_position=position)
                made.append((layer, data, case))
    assert len({id(layer.session) for layer, _, _ in made}) == 6
    chance = random.Random(3)
    outs = []
    for _ in range(90):
        layer, data, case = made[chance.randrange(len(made))]
        count = chance.choice((0, 1, 100, case.count(0)))
        args = data.mine(min(count, case.count(ranks.rank)))
        outs.append((layer(*args), args, data))
    for layer, _, _ in made:
        layer.synchronize()
    for out, args, data in outs:
        assert data.error(out, args) <= BUDGET
    made.clear()
    outs.clear()
    del layer, data
    torch.cuda.synchronize()
    for group in groups[1:]:
        moe_tk.ops.release_ops_memory()
        ranks.meet()
        dist.destroy_process_group(group)


def _in_group(ranks: Ranks, group: dist.ProcessGroup | None) -> Ranks:
    """The same ranks in another group; None: the default one."""
    members = replace(ranks)
    members.group = resolve_group(group)
    return members


def killed_in_flight(ranks: Ranks) -> None:
    """Rank 1 is killed somewhere in its calls: rank 0 raises PeerLost within a second, and its GPU works on (KRN-11)."""
    layer, data = loaded(SMALL, ranks, timeout_s=30.0)
    args = data.mine()
    layer(*args)
    layer.synchronize()
    ranks.meet()
    struck = time.monotonic() + 0.5  # the clock of the machine, so the same on both ranks up to the time that meeting takes
    if ranks.rank == 1:
        threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
    with pytest.raises(PeerLost, match="rank 1 died"):
        while time.monotonic() < struck + 5.0:
            for _ in range(20):
                out = layer(*args)
            layer.synchronize()
            assert data.error(out, args) <= BUDGET
    assert time.monotonic() - struck < 1.0 + 0.3
    assert torch.ones(1000, device=ranks.device).sum().item() == 1000
