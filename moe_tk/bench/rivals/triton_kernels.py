"""Triton kernels of the rivals: sorting by expert, activation, combine, and a plain grouped GEMM. Importing this needs Triton."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _swiglu(both, act, inter, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(both + row * 2 * inter + col, mask=col < inter).to(tl.float32)
    up = tl.load(both + row * 2 * inter + inter + col, mask=col < inter).to(tl.float32)
    tl.store(act + row * inter + col, (gate / (1 + tl.exp(-gate)) * up).to(tl.bfloat16), mask=col < inter)


@triton.jit
def _combine(rows, slots, weights, weights_stride, out, hidden, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for choice in tl.static_range(TOP_K):
        slot = tl.load(slots + token * TOP_K + choice).to(tl.int64)
        weight = tl.load(weights + token * weights_stride + choice)
        row = tl.load(rows + slot * hidden + col, mask=(col < hidden) & (slot >= 0), other=0.0)
        total += row.to(tl.float32) * weight
    tl.store(out + token * hidden + col, total.to(tl.bfloat16), mask=col < hidden)


@triton.jit(do_not_specialize=["num_experts"])
def _grouped_gemm(x, token, w, out, ends, num_experts, n, k, GATHER: tl.constexpr, EVEN_K: tl.constexpr, EXPERTS: tl.constexpr,
                  BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr):
    """One tile of out [M, n] = x [., k] times w [E, n, k] of the rows' experts. Tiles beyond the last one have nothing to do."""
    # which tile this is: row tiles of all experts in one list, GROUP of them by column
    expert = tl.arange(0, EXPERTS)
    last = tl.load(ends + expert, mask=expert < num_experts, other=0)
    first = tl.load(ends + expert - 1, mask=(expert < num_experts) & (expert > 0), other=0)
    tiles = tl.where(expert < num_experts, (last - first + BLOCK_M - 1) // BLOCK_M, 0)
    tile_end = tl.cumsum(tiles, 0)
    total, columns = tl.sum(tiles, 0), (n + BLOCK_N - 1) // BLOCK_N
    index, in_group = tl.program_id(0) // (GROUP * columns), tl.program_id(0) % (GROUP * columns)
    size = min(total - index * GROUP, GROUP)
    if size <= 0:
        return
    tile_m, tile_n = index * GROUP + in_group % size, in_group // size
    if tile_n >= columns:
        return
    e = tl.sum((tile_end <= tile_m).to(tl.int32), 0)
    here = expert == e
    begin = tl.sum(tl.where(here, first - (tile_end - tiles) * BLOCK_M, 0), 0) + tile_m * BLOCK_M
    row = begin + tl.arange(0, BLOCK_M)
    is_row = row < tl.sum(tl.where(here, last, 0), 0)
    source = row
    if GATHER:
        source = tl.load(token + row, mask=is_row, other=0)
    col = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    depth = tl.arange(0, BLOCK_K)
    a = x + source.to(tl.int64)[:, None] * k + depth[None, :]
    b = w + e.to(tl.int64) * n * k + tl.where(col < n, col, 0).to(tl.int64)[None, :] * k + depth[:, None]
    acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for at in range(0, k, BLOCK_K):
        if EVEN_K:
            left, right = tl.load(a, mask=is_row[:, None], other=0.0), tl.load(b)
        else:
            inside = at + depth < k
            left = tl.load(a, mask=is_row[:, None] & inside[None, :], other=0.0)
            right = tl.load(b, mask=inside[:, None], other=0.0)
        acc = tl.dot(left, right, acc)
        a += BLOCK_K
        b += BLOCK_K
    to = out + row.to(tl.int64)[:, None] * n + col[None, :]
    tl.store(to, acc.to(tl.bfloat16), mask=is_row[:, None] & (col < n)[None, :])


@triton.jit(do_not_specialize=["pairs", "first", "num_experts"])
def _count(routing, place, load, pairs, first, num_experts, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    """place of each pair among those of its expert, in the order in which they come; -1 for other ranks' pairs."""
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    expert = tl.load(routing + pair // TOP_K * (2 * TOP_K) + pair % TOP_K, mask=pair < pairs, other=-1) - first
    mine = (expert >= 0) & (expert < num_experts) & (pair < pairs)
    found = tl.atomic_add(load + tl.where(mine, expert, 0), 1, mask=mine)
    tl.store(place + pair, tl.where(mine, found, -1), mask=pair < pairs)


@triton.jit(do_not_specialize=["num_experts"])
def _sum_up(load, ends, num_experts, EXPERTS: tl.constexpr):
    expert = tl.arange(0, EXPERTS)
    tl.store(ends + expert, tl.cumsum(tl.load(load + expert, mask=expert < num_experts, other=0), 0), mask=expert < num_experts)


@triton.jit(do_not_specialize=["pairs", "first", "num_experts"])
def _place(routing, place, ends, load, token, pairs, first, num_experts, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    """place becomes the row of the pair; token [rows]."""
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    found = tl.load(place + pair, mask=pair < pairs, other=-1)
    expert = tl.load(routing + pair // TOP_K * (2 * TOP_K) + pair % TOP_K, mask=found >= 0, other=0) - first
    row = tl.load(ends + expert, mask=found >= 0, other=0) - tl.load(load + expert, mask=found >= 0, other=0) + found
    tl.store(token + row, pair // TOP_K, mask=found >= 0)
    tl.store(place + pair, row, mask=found >= 0)


COLUMNS = 1024  # of a program that streams
PAIRS = 256     # of a program that sorts


def sort_pairs(routing: Tensor, *, top_k: int, first: int, num_experts: int, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """(ends [num_experts], token [rows], slots [tokens, top_k]) of rivals.serial.Sorted from routing [tokens, 2 top_k], whose
    first half are expert ids. Rows of an expert are in no certain order."""
    tokens = routing.shape[0]
    pairs, device = tokens * top_k, routing.device
    load = torch.zeros(num_experts, dtype=torch.int32, device=device)
    ends, token = torch.empty_like(load), torch.empty(rows, dtype=torch.int32, device=device)
    slots = torch.empty(tokens, top_k, dtype=torch.int32, device=device)
    grid, sizes = (triton.cdiv(pairs, PAIRS),), {"TOP_K": top_k, "BLOCK": PAIRS}
    _count[grid](routing, slots, load, pairs, first, num_experts, **sizes)
    _sum_up[(1,)](load, ends, num_experts, EXPERTS=lanes_of(num_experts))
    _place[grid](routing, slots, ends, load, token, pairs, first, num_experts, **sizes)
    return ends, token, slots


def lanes_of(experts: int) -> int:
    """Power of two that holds them: at least 128, so that most shapes share their kernels."""
    return max(128, triton.next_power_of_2(experts))


def swiglu(both: Tensor) -> Tensor:
    """[M, 2 I], gate columns first -> [M, I]."""
    rows, inter = both.shape[0], both.shape[1] // 2
    act = torch.empty(rows, inter, dtype=both.dtype, device=both.device)
    _swiglu[(rows, triton.cdiv(inter, COLUMNS))](both, act, inter, BLOCK=COLUMNS)
    return act


def combine(rows: Tensor, routed: Any) -> Tensor:
    """[tokens, H]: sum of the token's rows by their weights."""
    (tokens, top_k), hidden = routed.slots.shape, rows.shape[1]
    out = torch.empty(tokens, hidden, dtype=rows.dtype, device=rows.device)
    _combine[(tokens, triton.cdiv(hidden, COLUMNS))](rows, routed.slots, routed.weights, routed.weights.stride(0), out, hidden,
                                                     TOP_K=top_k, BLOCK=COLUMNS)
    return out


def grouped_gemm(x: Tensor, token: Tensor | None, w: Tensor, ends: Tensor, num_rows: int, tile: dict[str, int]) -> Tensor:
    """[num_rows, n] = rows of x (all, or those that `token` [num_rows] names) times w [E, n, k] transposed.

    tile  BLOCK_M, BLOCK_N, BLOCK_K, GROUP, num_warps, num_stages
    """
    experts, n, k = w.shape
    out = torch.empty(num_rows, n, dtype=x.dtype, device=x.device)
    row_tiles = num_rows // tile["BLOCK_M"] + min(experts, num_rows)  # at most: each expert's last one may be partly empty
    groups = triton.cdiv(row_tiles, tile["GROUP"])
    _grouped_gemm[(groups * tile["GROUP"] * triton.cdiv(n, tile["BLOCK_N"]),)](
        x, token if token is not None else ends, w, out, ends, experts, n, k, GATHER=token is not None,
        EVEN_K=k % tile["BLOCK_K"] == 0, EXPERTS=lanes_of(experts), **tile)
    return out
