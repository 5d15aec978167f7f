"""What the ranks do in the tests of ag_gemm and gemm_rs in e4m3 on CUDA. Each function runs on every rank and asserts."""

from __future__ import annotations

import random

import pytest
import torch

from moe_tk import ops, reference
from moe_tk.errors import ArgumentError, MoETkError, PeerRefused
from moe_tk.weights import gemm as gemm_weights
from tests.cuda.checks import Ranks
from tests.cuda.checks_ops import DENSE_SIZES, both, draw, poison
from tests.cuda.checks_ops_fp8 import Results, equal

BUDGET = reference.ERROR_BUDGET[torch.bfloat16]  # rows that the kernel quantises differ from torch's in few places


class ScaledDense:
    """Operands of a dense op in e4m3 on all ranks, the same on each: sizes as in checks_ops, K in blocks of scales. given: rows of
    ag_gemm come quantised, else the kernel does it."""

    def __init__(self, ranks: Ranks, tokens: int, depth: int, columns: int, given: bool = True, seed: int = 0) -> None:
        self.ranks, self.tokens, self.given = ranks, tokens, given
        world, device = ranks.world, ranks.device
        depth = -(-depth // 128) * 128
        self.x = draw(seed + 1, world * tokens, depth, device=device)
        self.weight = self.quantise(draw(seed + 2 + ranks.rank, 1, columns + 8 * ranks.rank, depth, device=device))  # widths differ
        depths = [depth + 128 * rank for rank in range(world)]
        self.parts = [gemm_weights.quantise_rows(draw(seed + 50 + rank, world * tokens, depths[rank], device=device))
                      for rank in range(world)]
        self.weights = [self.quantise(draw(seed + 90 + rank, 1, columns, depths[rank], device=device)) for rank in range(world)]

    @staticmethod
    def quantise(weight: torch.Tensor) -> Results:
        """(e4m3 [N, K], scale pairs, values) of [1, N, K]."""
        values, scales = gemm_weights.quantise_weights(weight)
        return values[0], gemm_weights.scale_pairs(scales)[0], gemm_weights.dequantise_weights(values, scales)[0].double()

    @property
    def mine(self) -> slice:
        return slice(self.ranks.rank * self.tokens, (self.ranks.rank + 1) * self.tokens)

    def gather(self) -> torch.Tensor:
        x, scales = self.x[self.mine], None
        if self.given:
            x, scales = gemm_weights.quantise_rows(x)
            scales = scales.t()
        return ops.ag_gemm(x, self.weight[0], x_scales=scales, weight_scales=self.weight[1], group=self.ranks.group)

    def scatter(self) -> torch.Tensor:
        (x, scales), (weight, pairs, _) = self.parts[self.ranks.rank], self.weights[self.ranks.rank]
        return ops.gemm_rs(x, weight, x_scales=scales, weight_scales=pairs, group=self.ranks.group)

    def check(self, gathered: torch.Tensor, scattered: torch.Tensor, what: object) -> None:
        rows = gemm_weights.dequantise_rows(*gemm_weights.quantise_rows(self.x)).double()
        want = sum(gemm_weights.dequantise_rows(*part)[self.mine].double() @ weight[2].T
                   for part, weight in zip(self.parts, self.weights, strict=True))
        for name, out, wanted in (("ag_gemm", gathered, rows @ self.weight[2].T), ("gemm_rs", scattered, want)):
            assert out.dtype == torch.bfloat16 and out.shape == wanted.shape, (name, what, out.shape, wanted.shape)
            error = reference.relative_error(out, wanted)
            assert error <= BUDGET, f"{name} {what}: {error}"


@both
def dense(ranks: Ranks) -> None:
    """ag_gemm and gemm_rs against float64 with poisoned memory, bitwise equal when repeated; no tail is a tile (KRN-13, KRN-14)."""
    for number, sizes in enumerate((*DENSE_SIZES, *DENSE_SIZES[2:0:-1])):
        operands, results = ScaledDense(ranks, *sizes, given=number % 2 == 1), []
        for _ in range(2):
            poison(ranks)
            results.append((operands.gather(), operands.scatter()))
            ops.synchronize(ranks.group)
        operands.check(*results[0], sizes)
        assert equal(*results), f"{sizes}: not bitwise equal when repeated"


def back_to_back(ranks: Ranks) -> None:
    """Calls without a wait between them, whose rows rise and fall under the same workspace; then one graph of both."""
    choose = random.Random(3)
    cases = [ScaledDense(ranks, tokens, 512, 264, seed % 2 == 1, seed) for seed, tokens in enumerate((1024, 1, 700, 64, 0, 333))]
    expected = [(case.gather().clone(), case.scatter().clone()) for case in cases]
    ops.synchronize(ranks.group)
    for case, results in zip(cases, expected, strict=True):
        case.check(*results, case.tokens)
    wrong = torch.zeros((), dtype=torch.int64, device=ranks.device)
    for step in range(400):
        index = choose.randrange(len(cases))
        if step % 97 == 5 * ranks.rank:
            torch.cuda._sleep(3_000_000)
        wrong += (cases[index].gather() != expected[index][0]).any() | (cases[index].scatter() != expected[index][1]).any()
    ops.synchronize(ranks.group)
    assert int(wrong) == 0
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.Stream(), capture_error_mode="thread_local"):
        captured = cases[2].gather(), cases[2].scatter()
    for _ in range(3):
        for tensor in captured:
            tensor.fill_(float("nan"))
        graph.replay()
        ops.synchronize(ranks.group)
        assert equal(captured, expected[2])


def refusals(ranks: Ranks) -> None:
    """Bad arguments on one rank and calls that differ are computed by none: NaN, an error on each rank, all go on (KRN-07)."""
    good = ScaledDense(ranks, 60, 128, 72)
    good.check(good.gather(), good.scatter(), "before")
    rows, scales = good.parts[ranks.rank]
    bad = (lambda: ops.ag_gemm(good.x[good.mine], good.weight[0]),
           lambda: ops.gemm_rs(rows, good.weights[ranks.rank][0], x_scales=scales))
    for refused, call in zip(bad, (good.gather, good.scatter), strict=True):
        if ranks.rank == 0:
            with pytest.raises(ArgumentError, match="weight is float8_e4m3fn, so weight_scales"):
                refused()
            ops.synchronize()
        else:
            out = call()
            with pytest.raises(PeerRefused, match="rank 0 refused"):
                ops.synchronize()
            assert out.isnan().all()
    uneven = ScaledDense(ranks, 50 + ranks.rank, 128, 72)
    for call in (uneven.gather, uneven.scatter):
        out = call()
        with pytest.raises(MoETkError, match="ranks disagreed"):
            ops.synchronize()
        assert out.isnan().all()
    good.check(good.gather(), good.scatter(), "after")
    ops.synchronize()
