"""What the ranks do in the tests of the compiled pairs of fused GEMMs, each of which is forced in turn."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable

import torch

from moe_tk.planner import FUSED_VARIANTS
from moe_tk.planner.fused_tiles import PLACED_HIDDEN
from tests.cuda.checks import BUDGET, Case, Data, Ranks, poisoned_call
from tests.cuda.checks_fp8 import ScaledData, fp8_layer

# Sizes at which tiles of either width are cut: the last step of 256 columns of H has one tile of 128 or two, or the tile is cut
# itself; K ends within a stage of two panels; experts have no rows, few, and several blocks.
CASES = [
    Case(200, 4, 12, (200, 77), hidden=264, inter=136), Case(200, 4, 12, (0, 200), "tp", hidden=2184, inter=392),
    Case(333, 8, 16, (300, 333), "ep", None, 2, "hot_expert", hidden=1160, inter=72, weight_position="combine"),
    Case(100, 2, 40, (100,), hidden=128, inter=64), Case(512, 2, 4, (512,), hidden=4096, inter=1000),
    Case(64, 6, 64, (64,), hidden=7168, inter=512)]
FP8_CASES = [  # scales cover whole runs of 128 columns
    Case(200, 4, 12, (200, 77), hidden=384, inter=128), Case(200, 4, 12, (0, 200), "tp", hidden=2176, inter=512),
    Case(333, 8, 16, (300, 333), "ep", None, 2, "hot_expert", hidden=1152, inter=384, weight_position="combine"),
    Case(100, 2, 40, (100,), hidden=128, inter=128), Case(512, 2, 4, (512,), hidden=4096, inter=1024)]


def outputs(layer, ranks: Ranks, args: tuple[torch.Tensor, ...], dtype: str) -> Iterable[tuple[str, torch.Tensor]]:
    """(what was forced, the result with poisoned buffers): every pair, in one pass over the columns of GEMM 2 and in two; then
    calls in which no two neighbours among the ranks have the same pair."""
    names = [variant.name for variant in FUSED_VARIANTS[dtype] if not variant.placed or layer.hidden_size >= PLACED_HIDDEN[0]]
    mixed = [names[(ranks.rank + turn) % len(names)] for turn in range(len(names))]
    for name, passes in (*itertools.product(names, (1, 2)), *((name, 1) for name in mixed)):
        layer._calls.variant, layer._calls.passes = name, passes
        yield f"{name} passes {passes}", poisoned_call(layer, ranks, args)


def all_equal(found: Iterable[tuple[str, torch.Tensor]], check: Callable[[str, torch.Tensor], None]) -> None:
    """Each is right, and bitwise equal to the first: all pairs sum in the same order."""
    first = None
    for what, out in found:
        check(what, out)
        first = out if first is None else first
        assert torch.equal(out, first), f"{what}: not bitwise equal to the first"


def bf16(ranks: Ranks) -> None:
    """Each pair of the bfloat16 layer against float64."""
    for case in CASES:
        layer, data = case.layer(ranks, pattern="two_kernel"), Data(case, ranks)
        data.load(layer)
        args = data.mine()

        def check(what: str, out: torch.Tensor, case=case, data=data, args=args) -> None:
            error = data.error(out, args)
            assert error <= BUDGET, f"{case} {what}: {error}"

        all_equal(outputs(layer, ranks, args, "bfloat16"), check)


def e4m3(ranks: Ranks) -> None:
    """Each pair of the e4m3 layer against both oracles."""
    for case in FP8_CASES:
        layer, data = fp8_layer(case, ranks, pattern="two_kernel"), ScaledData(case, ranks)
        data.load(layer)
        args = data.mine()

        def check(what: str, out: torch.Tensor, case=case, layer=layer, data=data, args=args) -> None:
            data.check(layer, out, args, f"{case} {what}")

        all_equal(outputs(layer, ranks, args, "float8_e4m3fn"), check)
