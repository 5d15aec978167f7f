"""ag_gemm and gemm_rs against gather and matmul, matmul and sum, in float64; outputs that are not written would be NaN."""

from __future__ import annotations

import pytest
import torch
from ops_ranks import gather, scatter, uneven, widths_change

F32, BF16 = torch.float32, torch.bfloat16


@pytest.mark.parametrize("world", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_ag_gemm_equals_gather_and_matmul(run_ranks, world, dtype):
    """Tails in every extent; columns that differ from rank to rank; no rows at all."""
    calls = [(0, 8, [5] * world, dtype), (1, 8, [1] * world, dtype), (33, 72, [65] * world, dtype), (64, 64, [64] * world, dtype),
             (7, 136, [3 + rank for rank in range(world)], dtype), (100, 16, [130 - 7 * rank for rank in range(world)], dtype)]
    run_ranks(world, gather, calls)


def test_krn_13_rows_vary_under_one_buffer(run_ranks):
    """M rises and falls on buffers that were made for more rows; N and K are no multiples of a tile; stale rows are never read."""
    rising = [1, 8, 17, 129, 500, 2048, 4096]
    run_ranks(2, gather, [(tokens, 24, [20, 20], F32) for tokens in (*rising, *rising[::-1])])


@pytest.mark.parametrize("world", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_krn_14_gemm_rs_equals_matmul_and_sum(run_ranks, world, dtype):
    """Every type and world: no zeros and no NaN in place of a sum; depths that differ from rank to rank; no rows at all."""
    calls = [(0, 8, [5] * world, dtype), (1, 8, [1] * world, dtype), (33, 72, [65] * world, dtype), (64, 64, [64] * world, dtype),
             (7, 136, [3 + rank for rank in range(world)], dtype), (40, 16, [130 - 7 * rank for rank in range(world)], dtype)]
    run_ranks(world, scatter, calls)


@pytest.mark.parametrize("depth", [96, 72, 130, 1, 255, 257])
def test_krn_23_depth_that_is_no_multiple_of_a_tile(run_ranks, depth):
    run_ranks(2, scatter, [(5, 40, [depth, depth], F32), (1, 8, [depth, depth], BF16)])


def test_krn_07_uneven_rows_are_refused_on_all_ranks(run_ranks):
    """Ops that need the same T say so on every rank, with all T and the remedy; nobody waits, the next calls are right."""
    results = run_ranks(4, uneven)
    for told in results:
        for name, remedy in (("ag_gemm", "6, 7, 7, 7 rows, wanted the same number on all: pad x to the largest"),
                             ("gemm_rs", "24, 28, 28, 28 rows, wanted the same number on all: every rank holds all M rows"),
                             ("dispatch_gemm", "6, 7, 7, 7 rows, wanted the same number on all: or pass tokens_per_rank=7 on all "
                              "ranks"),
                             ("too small", "6, 7, 7, 7 tokens, more than tokens_per_rank=6; wanted at least 7")):
            error, text, seconds = told[name]
            assert error == "ArgumentError" and remedy in text and seconds < 3.0, (name, text)


def test_widths_that_change_on_some_ranks_only(run_ranks):
    """Once a hang: one rank found its buffers for the old width, the other made new ones."""
    run_ranks(2, widths_change)
    run_ranks(3, widths_change)
