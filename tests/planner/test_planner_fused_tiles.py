"""Which tiles the fused GEMMs of a call take: the rule at its limits, and on known shapes."""

from __future__ import annotations

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_tk.builder.native_root import native_root
from moe_tk.planner import FUSED_VARIANTS, FusedVariant, choose_variant, row_block_of, variant_index
from moe_tk.planner.fused_tiles import PLACED_HIDDEN, expected_blocks

# experts, top k, H, I
SHAPES = {"mixtral-8x7b": (8, 2, 4096, 14336), "qwen3-30b-a3b": (128, 8, 2048, 768), "deepseek-v3": (256, 8, 7168, 2048),
          "seed": (64, 8, 4096, 3072)}
FEW_COLUMNS = dict(hidden=2048, intermediate=768)
DTYPES = sorted(FUSED_VARIANTS)


def chosen(shape: str, tokens: int, dtype: str = "bfloat16", world: int = 2) -> FusedVariant:
    """Of a call in EP with one segment."""
    experts, top_k, hidden, inter = SHAPES[shape]
    index = choose_variant(dtype, row_block=row_block_of(world, tokens, top_k, experts), groups=experts // world,
                           rows=world * tokens * top_k / experts, hidden=hidden, intermediate=inter)
    return FUSED_VARIANTS[dtype][index]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype, name", [("bfloat16", "64x128"), ("float8_e4m3fn", "64x256_128")])
def test_few_tokens_take_narrow_tiles(shape, dtype, name):
    assert {chosen(shape, tokens, dtype).name for tokens in (0, 1, 16, 64)} == {name}


@pytest.mark.parametrize("rows, bf16, e4m3", [
    (32, "64x128", "64x256_128"), (33, "64x256", "64x256_128"), (96, "64x256", "64x256_128"), (97, "64x256", "64x256")])
def test_blocks_of_64_rows_are_wide_where_an_expert_has_several(rows, bf16, e4m3):
    for dtype, name in (("bfloat16", bf16), ("float8_e4m3fn", e4m3)):
        assert FUSED_VARIANTS[dtype][choose_variant(dtype, row_block=64, groups=8, rows=rows, **FEW_COLUMNS)].name == name


@pytest.mark.parametrize("shape, tokens", [("mixtral-8x7b", 512), ("mixtral-8x7b", 8192), ("qwen3-30b-a3b", 512),
                                           ("qwen3-30b-a3b", 2048), ("seed", 2048), ("deepseek-v3", 8192)])
def test_blocks_of_128_rows_are_wide(shape, tokens):
    assert chosen(shape, tokens).name == "128x256"


@pytest.mark.parametrize("shape, tokens, placed", [
    ("qwen3-30b-a3b", 8192, False), ("seed", 64, False), ("seed", 511, False), ("seed", 512, True), ("mixtral-8x7b", 512, True),
    ("deepseek-v3", 1024, False), ("deepseek-v3", 2048, True)])
def test_rows_are_placed_where_that_was_faster(shape, tokens, placed):
    """e4m3 alone, with many rows an expert and many columns of GEMM 1."""
    found = chosen(shape, tokens, "float8_e4m3fn")
    assert found.placed is placed and (found.row_block == 128 or not placed)
    assert not chosen(shape, tokens).placed


@pytest.mark.parametrize("hidden, placed", [(384, False), (512, True), (16384, True), (16512, False)])
def test_rows_are_placed_where_they_and_their_scales_fit(hidden, placed):
    index = choose_variant("float8_e4m3fn", row_block=128, groups=4, rows=1000, hidden=hidden, intermediate=4096)
    assert FUSED_VARIANTS["float8_e4m3fn"][index].placed is placed


@given(groups=st.integers(1, 300), rows=st.floats(0, 20000), row_block=st.sampled_from([64, 128]),
       dtype=st.sampled_from(DTYPES), inter=st.sampled_from([128, 4096]))
def test_every_size_has_a_variant_of_its_row_block(groups, rows, row_block, dtype, inter):
    index = choose_variant(dtype, row_block=row_block, groups=groups, rows=rows, hidden=1024, intermediate=inter)
    assert FUSED_VARIANTS[dtype][index].row_block == row_block
    blocks = expected_blocks(groups, rows, row_block)
    assert groups <= blocks <= max(groups, math.ceil(groups * (rows / row_block + 1)))


@pytest.mark.parametrize("dtype, file", [("bfloat16", "fused_gemm.cu"), ("float8_e4m3fn", "fused_gemm_fp8.cu")])
def test_table_is_what_is_compiled(dtype, file):
    """By the sources; nvlink_module() compares with the module itself."""
    text = (native_root() / "tk_kernels/nvlink" / file).read_text()
    pairs = re.findall(r'make_(fused|placed)<(\w+), (\w+)>\("(\w+)"\)', text)
    wide = {"gather": 256, "placed": 256, "scatter": 256, "narrow_gather": 128, "narrow_scatter": 128}
    found = [(name, int(first.rpartition("_")[2]), wide[first.rpartition("_")[0]], wide[second.rpartition("_")[0]],
              made == "placed") for made, first, second, name in pairs]
    assert found == [(v.name, v.row_block, v.gather_cols, v.scatter_cols, v.placed) for v in FUSED_VARIANTS[dtype]]


def test_limits_of_placing_are_those_of_the_kernel():
    """Of a run of 128 scales in half an output, and of blocks of 128 columns in a run."""
    text = (native_root() / "tk_kernels/nvlink/place_rows.cuh").read_text()
    run = int(re.search(r"SCALE_RUN_ROWS = (\d+)", text).group(1))
    assert "hidden >= RUN * int(sizeof(float)) && hidden <= RUN * RUN" in text
    assert (4 * run, run * run) == PLACED_HIDDEN


@pytest.mark.parametrize("dtype", DTYPES)
def test_names_are_unique_and_the_wide_ones_stand_first(dtype):
    names = [variant.name for variant in FUSED_VARIANTS[dtype]]
    assert len(set(names)) == len(names)
    assert [variant_index(dtype, 64), variant_index(dtype, 128)] == [0, 1]
