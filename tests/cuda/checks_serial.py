"""What the ranks do in the tests of the serial pattern and of the choice between the patterns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from moe_tk import reference
from moe_tk.runtime.nvlink import nvlink_module
from moe_tk.runtime.nvlink_session import COMBINE, GATHER, GEMM1, GEMM2, OPEN, PULL
from tests.cuda import checks
from tests.cuda.checks import BUDGET, LAYER_CASES, SMALL, TABLE_CASES, Case, Data, Ranks, check_tables, poisoned_call


def tables(ranks: Ranks) -> None:
    """The tables for the serial pattern's tiles equal the schedule's, the task lists of 128 columns among them."""
    found = {tile["name"]: tile for tile in nvlink_module().plain_tiles()}
    seen = set()
    for case in TABLE_CASES:
        layer = case.layer(ranks, pattern="serial")
        data = Data(case, ranks)
        tiles = [found[tile.name] for tile in layer._calls.tiles(case.count(ranks.rank))]
        columns = tuple(tile["columns"] for tile in tiles)
        seen.add(columns)
        check_tables(layer, data, tiles[0]["row_block"], columns, 1, str(columns))
    assert {128, 256} <= {width for columns in seen for width in columns}


def against_reference(ranks: Ranks) -> None:
    """The serial pattern against float64 with poisoned buffers, repeated, and bitwise equal to the fused one: both sum in the
    same order."""
    for case in LAYER_CASES:
        serial, fused = case.layer(ranks, pattern="serial"), case.layer(ranks, pattern="two_kernel")
        assert serial.session is fused.session, "the patterns share a workspace"
        for seed in range(2):
            data = Data(case, ranks, seed)
            data.load(serial)
            data.load(fused)
            args = data.mine()
            out = poisoned_call(serial, ranks, args)
            error = data.error(out, args)
            assert error <= BUDGET, f"{case} seed {seed}: {error}"
            assert torch.equal(out, poisoned_call(serial, ranks, args)), f"{case} seed {seed}: not bitwise equal when repeated"
            other = poisoned_call(fused, ranks, args)
            assert torch.equal(out, other), f"{case} seed {seed}: not bitwise equal to the fused pattern"


def every_tile(ranks: Ranks) -> None:
    """Each compiled tile in both GEMMs, on sizes with tails."""
    case = Case(200, 4, 12, (200, 77), hidden=520, inter=264)
    data = Data(case, ranks)
    x, ids, weights = args = data.mine()
    want = reference.moe_layer(*args, data.w13, data.w2)
    for index, tile in enumerate(nvlink_module().plain_tiles()):
        layer = replace(case, row_block=tile["row_block"]).layer(ranks, pattern="serial")
        data.load(layer)
        fields = layer._calls._fields(*layer._calls.choices(len(x)), 7, x, ids, weights, out := torch.full_like(x, float("nan")))
        fields.update(gemm1_tile=index, gemm2_tile=index, passes=1)
        layer.session.run(fields, stages=OPEN | PULL | GEMM1 | GEMM2 | COMBINE, timeout_s=5.0)
        layer.synchronize()
        error = reference.relative_error(out, want)
        assert error <= BUDGET, f"{tile['name']}: {error}"


def one_stage_at_a_time(ranks: Ranks) -> None:
    """The stages launched one by one give the call's result, GEMMs also when repeated; those of two patterns do not mix."""
    data = Data(SMALL, ranks)
    layer = SMALL.layer(ranks, pattern="serial")
    data.load(layer)
    args = data.mine()
    want = poisoned_call(layer, ranks, args)
    out = torch.full_like(want, float("nan"))
    layer.session.workspace.poison()
    ranks.meet()
    for stage in (OPEN, PULL, GEMM1, GEMM1, GEMM2, GEMM2, COMBINE):
        layer._calls.forward(*args, out, signature=layer._signature, stages=stage, pattern="serial")
    layer.synchronize()
    assert torch.equal(out, want)
    for pattern, stages in (("serial", OPEN | GATHER), ("two_kernel", PULL), ("serial", 128)):
        with pytest.raises(ValueError, match=f"stages {stages} are not of the"):
            layer._calls.forward(*args, out, signature=layer._signature, stages=stages, pattern=pattern)


def mixed_patterns(ranks: Ranks) -> None:
    """Ranks that run different patterns meet in one call: they show each other the same things."""
    for case in (SMALL, *LAYER_CASES[2:6]):
        serial, fused = case.layer(ranks, pattern="serial"), case.layer(ranks, pattern="two_kernel")
        data = Data(case, ranks)
        args = data.mine()
        for layer in (serial, fused):
            data.load(layer)
        want = poisoned_call(fused, ranks, args)
        assert data.error(want, args) <= BUDGET
        outputs = []
        for turn in range(20):  # no wait between them: neither pattern may touch what the other still reads
            fused._calls.pattern = "serial" if (ranks.rank + turn // 2) % 2 else "two_kernel"
            outputs.append(fused(*args))
        fused.synchronize()
        assert all(torch.equal(out, want) for out in outputs), case


def auto_follows_its_plan(ranks: Ranks) -> None:
    """Calls of an "auto" layer with every number of tokens, also when ranks choose differently, are right."""
    case = Case(2048, 8, 64, (2048,), hidden=2048, inter=768)
    layer = case.layer(ranks, pattern="auto")
    data = Data(case, ranks)
    data.load(layer)
    seen = set()
    for step, count in enumerate((0, 1, 16, 64, 200, 512, 2048)):
        count = 2048 if ranks.rank == step % 2 and step > 3 else count
        args = data.mine(count)
        seen.add(layer._calls.pattern_of(count))
        out = layer(*args)
        layer.synchronize()
        if count:
            assert data.error(out, args) <= BUDGET, f"{count} tokens"
    text = layer.plan.explain()
    assert all(pattern in text for pattern in seen) and "ceiling" in text and "wave" in text, text


def with_pattern(ranks: Ranks, pattern: str) -> Ranks:
    return Ranks(ranks.rank, ranks.world, ranks.device, pattern=pattern)


def half_serial(ranks: Ranks) -> Ranks:
    return with_pattern(ranks, "serial" if ranks.rank % 2 == 0 else "two_kernel")


def serial(check: Callable[[Ranks], None]) -> Callable[[Ranks], None]:
    """`check` with layers of the serial pattern."""
    return lambda ranks: check(with_pattern(ranks, "serial"))


def mixed(check: Callable[[Ranks], None]) -> Callable[[Ranks], None]:
    """`check` with layers that are serial on even ranks and fused on odd ones."""
    return lambda ranks: check(half_serial(ranks))


back_to_back = mixed(checks.back_to_back)
graphs, refusals, late_rank, missing_rank, dead_rank = map(
    serial, (checks.graphs, checks.refusals, checks.late_rank, checks.missing_rank, checks.dead_rank))
