"""Bitwise equality: from run to run, whoever is late, whatever the plan; and bfloat16 rounding as torch rounds."""

from __future__ import annotations

import itertools

import pytest
import torch
from backends import cuda, each_movement, on_both_with_ranks, ranks_on
from layer_ranks import run_delayed_steps, run_epochs
from moe_cases import LayerCase, call, with_options
from numerics_ranks import other_plans

from moe_tk import ops, reference
from moe_tk.runtime.serial import grouped_gemm

CASE = LayerCase(((64, 17, 40), (9, 64, 0)), ("uniform", "half"), max_tokens=64, dtype=torch.bfloat16, num_experts=12, top_k=4)


@pytest.mark.parametrize("mode", ["ep", "tp"])
@each_movement(("mega", False), ("mega", True), ("two_kernel", False), ("two_kernel", True), ("serial", False), world=2)
def test_num_08_equal_bits_from_run_to_run(run_ranks, backend, pattern, pull, mode):
    """The same calls on two layer objects, four times each, other ranks late every time: one set of bits."""
    case, world = with_options(CASE, pattern=pattern, pull=pull, mode=mode).on(backend), ranks_on(backend, 3)
    runs = [run_ranks(world, run_epochs, case, delay_seed=seed, repeats=2, backend=backend) for seed in (1, 2)]
    for first, second in zip(*runs, strict=True):
        assert first == second and first[:2] == first[2:]


@pytest.mark.parametrize("mode", ["ep", "tp"])
@pytest.mark.parametrize("weight_position", ["before_l2", "combine"])
@on_both_with_ranks
def test_num_08_bits_do_not_depend_on_the_plan(run_ranks, backend, mode, weight_position):
    """Pattern, direction, number of blocks and number of segments change what happens when, not one bit of the result."""
    variants = [dict(pattern=pattern, pull=pull, compute_blocks=blocks, segments=segments)
                for pattern, pull in itertools.product(["mega", "two_kernel"], [False, True])
                for blocks, segments in [(1, 1), (3, 4)]]
    if backend == "cuda":
        variants = [dict(row_block=row_block, segments=segments, reserve_sms=reserve)
                    for row_block, segments, reserve in [(64, 1, 0), (128, 1, 0), (64, 4, 0), (128, 3, 40)]]
    case = with_options(CASE, mode=mode, weight_position=weight_position).on(backend)
    for digests in run_ranks(ranks_on(backend, 3), other_plans, case, variants, backend=backend):
        assert len(set(digests)) == 1, list(zip(variants, digests, strict=True))


def test_num_08_late_steps_change_no_bit(run_ranks):
    """A rank that naps before its exchange or before its launches."""
    for pattern in ("mega", "two_kernel"):
        case = with_options(CASE, pattern=pattern)
        wanted = run_ranks(3, run_epochs, case)
        for step, late in itertools.product(("exchange", "launch"), (0, 2)):
            assert run_ranks(3, run_delayed_steps, case, step, late) == wanted


def test_bfloat16_is_rounded_as_torch_rounds():
    """Products of two bfloat16 numbers are exact in float32, so the stored result is one rounding, to nearest, ties to even."""
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-2**15, 2**15, (4096,), generator=generator).to(torch.int16)
    special = torch.tensor([0, -2**15, 1, 0x7F, 0x80, 0x7F7F, 0x7F80, -0x80, 0x3F80, 0x3F81, 0x4000], dtype=torch.int16)
    left = torch.cat([bits, special.repeat_interleave(len(special))]).view(torch.bfloat16)
    right = torch.cat([bits.flip(0), special.repeat(len(special))]).view(torch.bfloat16)
    rows = torch.zeros(len(left), 8, dtype=torch.bfloat16)
    rows[:, 3] = left
    for start in range(0, len(left), 512):
        part = slice(start, start + 512)
        weight = torch.zeros(len(left[part]), 8, dtype=torch.bfloat16)
        weight[:, 3] = right[part]
        got = grouped_gemm(rows[part], weight[None], [0, len(left[part])], 32).diagonal()
        want = (left[part].float() * right[part].float()).bfloat16()
        same = (got.view(torch.int16) == want.view(torch.int16)) | (got.isnan() & want.isnan()) | ((got == 0) & (want == 0))
        assert bool(same.all()), (left[part][~same], right[part][~same], got[~same], want[~same])


@pytest.mark.parametrize("depth", [1, 7, 72, 96, 130, 255, 256, 257, 4096])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_krn_23_depth_of_any_size(depth, dtype):
    """K that is no multiple of a panel or a block; one row per group and empty groups among them."""
    generator = torch.Generator().manual_seed(depth)
    offsets = [0, 1, 1, 2, 40, 40, 41]
    rows = torch.randn(41, depth, generator=generator).to(dtype)
    weights = (torch.randn(6, 19, depth, generator=generator) / depth**0.5).to(dtype)
    got = grouped_gemm(rows, weights, offsets, 32)
    want = torch.cat([rows[a:b].double() @ weights[g].double().T for g, (a, b) in enumerate(itertools.pairwise(offsets))])
    assert reference.relative_error(got, want) <= reference.ERROR_BUDGET[dtype]


@pytest.mark.parametrize("m, n, k", [(2, 8, 147456), (1538, 256, 2048)])
def test_krn_23_extreme_shapes(m, n, k, nothing_left):
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(m, k, generator=generator), torch.randn(n, k, generator=generator) / k**0.5
    assert reference.relative_error(ops.gemm_rs(x, weight), x.double() @ weight.double().T) <= 1e-5


@pytest.mark.parametrize("backend, dtype", [("cpu", torch.bfloat16), ("cpu", torch.float32), cuda(torch.bfloat16, world=1)])
def test_error_budget_is_what_rounding_explains(backend, dtype, nothing_left):
    """The budgets are neither loose nor tight: real errors of both types lie between a twentieth and the whole of them."""
    case = LayerCase(((64,),), ("uniform",), 12, 4, 512, 256, 64, dtype).on(backend)
    layer = case.layer()
    inputs = case.inputs(0, 1, 0)
    error = reference.relative_error(call(layer, *inputs), layer.reference(*inputs, *case.weights()))
    assert reference.ERROR_BUDGET[dtype] / 50 <= error <= reference.ERROR_BUDGET[dtype], f"{dtype}: {error:.1e}"
