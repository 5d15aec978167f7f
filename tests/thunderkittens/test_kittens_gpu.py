"""Each operation of the tile library on a GPU, bit for bit where it only moves data. The layout facts are static_asserts."""

from __future__ import annotations

import pytest
import torch

from moe_tk.builder.build import load_module
from tests.build_modules import kittens_unit

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def kittens():
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a GPU of compute capability 9.0")
    return load_module(kittens_unit(), "kittens_unit")


def random(*shape, dtype=torch.bfloat16):
    return torch.randn(*shape, device="cuda").to(dtype)


def raw(tensor):
    return tensor.view(torch.uint8)


def assert_product(got, want, kind):
    """Every element, and the whole. The tensor core keeps about 14 bits of the sums of e4m3 products."""
    close = 1e-5 if kind == "bf16" else 2e-3
    assert (got.double() - want).norm() <= close * want.norm()
    assert ((got.double() - want).abs() <= 20 * close * want.std()).all()


@pytest.mark.parametrize("name,cols,dtype", [("tma_128", 128, torch.bfloat16), ("tma_64", 32, torch.bfloat16),
                                             ("tma_32", 16, torch.bfloat16), ("tma_e4m3", 128, torch.float8_e4m3fn)])
@pytest.mark.parametrize("row,col_tiles", [(0, 0), (64, 1), (96, 1)])
def test_tma_moves_a_tile_and_fills_with_zeros_outside(kittens, name, cols, dtype, row, col_tiles):
    source = random(128, 2 * cols, dtype=dtype)
    target, seen = torch.zeros_like(source), torch.empty(64, cols, dtype=dtype, device="cuda")
    col = col_tiles * cols
    getattr(kittens, name)(source.data_ptr(), target.data_ptr(), seen.data_ptr(), 128, 2 * cols, row, col)
    wanted = torch.zeros(64, cols, dtype=dtype, device="cuda")
    part = source[row:row + 64, col:col + cols]
    raw(wanted)[: part.shape[0]] = raw(part)
    assert torch.equal(raw(seen), raw(wanted)), "operator[] and TMA disagree about the layout"
    wanted_target = torch.zeros_like(source)
    raw(wanted_target[row:row + 64, col:col + cols]).copy_(raw(part))
    assert torch.equal(raw(target), raw(wanted_target)), "written outside of the tile, or not all of it"


def test_bulk_vectors_and_both_phases_of_a_semaphore(kittens):
    source = torch.randn(5 * 64, device="cuda")
    target = torch.full_like(source, torch.nan)
    kittens.bulk(source.data_ptr(), target.data_ptr(), 5)
    assert torch.equal(source, target)


@pytest.mark.parametrize("group,rows", [("warp", 16), ("warpgroup", 64)])
@pytest.mark.parametrize("kind,dtype,cols", [("bf16", torch.bfloat16, 64), ("e4m3", torch.float8_e4m3fn, 128)])
def test_registers_to_shared_and_back(kittens, group, rows, kind, dtype, cols):
    source = random(rows, cols, dtype=dtype)
    seen = torch.zeros_like(source)
    getattr(kittens, f"registers_{group}_{kind}")(source.data_ptr(), seen.data_ptr())
    assert torch.equal(raw(seen), raw(source))


@pytest.mark.parametrize("kind,dtype,cols", [("bf16", torch.bfloat16, 64), ("e4m3", torch.float8_e4m3fn, 128)])
def test_mma_sync(kittens, kind, dtype, cols):
    a, b = random(32, cols, dtype=dtype), random(32, cols, dtype=dtype)
    out = torch.full((32, 32), torch.nan, device="cuda")
    getattr(kittens, f"mma_{kind}")(a.data_ptr(), b.data_ptr(), out.data_ptr())
    assert_product(out, a.double() @ b.double().t(), kind)


@pytest.mark.parametrize("n", [16, 32, 64, 96, 128, 192, 256])
@pytest.mark.parametrize("kind,dtype,cols", [("bf16", torch.bfloat16, 64), ("e4m3", torch.float8_e4m3fn, 128)])
def test_wgmma_sets_then_adds(kittens, kind, dtype, cols, n):
    a, b = random(64, cols, dtype=dtype), random(n, cols, dtype=dtype)
    out = torch.full((64, n), torch.nan, device="cuda")
    getattr(kittens, f"wgmma_{kind}")(n, a.data_ptr(), b.data_ptr(), out.data_ptr())
    assert_product(out, 2 * a.double() @ b.double().t(), kind)


def test_row_operations(kittens):
    x = random(16, 64)
    scaled = torch.full((16, 64), torch.nan, device="cuda")
    sums, largest = torch.zeros(16, device="cuda"), torch.zeros(16, device="cuda")
    kittens.rows(x.data_ptr(), scaled.data_ptr(), sums.data_ptr(), largest.data_ptr())
    assert torch.equal(largest, x.float().amax(1))
    torch.testing.assert_close(sums, x.float().sum(1), rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(scaled, x.float() * largest[:, None] * 2, rtol=3e-7, atol=0)
    x[3, 7] = torch.nan
    kittens.rows(x.data_ptr(), scaled.data_ptr(), sums.data_ptr(), largest.data_ptr())
    assert largest[3].isnan() and not largest[2].isnan(), "a NaN must stay in the largest"


def test_pgl_stores_into_every_rank(kittens):
    tile = random(64, 64)
    ranks = [torch.zeros(128, 64, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    kittens.pgl(tile.data_ptr(), *(rank.data_ptr() for rank in ranks))
    for index, rank in enumerate(ranks):
        assert torch.equal(rank[64 * index:64 * index + 64], tile)
        assert (rank[64 * (1 - index):64 * (1 - index) + 64] == 0).all()
