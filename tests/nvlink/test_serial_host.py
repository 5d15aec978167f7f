"""The serial pattern as far as it can be checked without a GPU: stages, tiles, and where a tile finds its weights."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from moe_tk.memory.nvlink_layout import MIN_COLUMN_BLOCK, ROW_BLOCKS, NvlinkGeometry
from moe_tk.planner.machine import H200
from moe_tk.runtime.nvlink_layer import TILE_BYTES, TILE_ROWS, NvlinkLayer, tiled
from moe_tk.runtime.nvlink_session import COMBINE, GATHER, GEMM1, GEMM2, OPEN, PULL, SCATTER, STAGES

TILE_COLS = TILE_BYTES // 2  # of bfloat16
TILES = {"128x256_s4_c2": (128, 256), "128x128_s6_c2": (128, 128), "64x256_s5_w2_c2": (64, 256), "64x128_s4_p2_c1": (64, 128)}


def layer(pattern: str = "auto", **changes) -> NvlinkLayer:
    """A layer without a session, of qwen3-30b-a3b on two ranks where not said."""
    bare = NvlinkLayer.__new__(NvlinkLayer)
    bare.geometry = NvlinkGeometry(**{**dict(world=2, rank=0, max_tokens=8192, top_k=8, num_experts=128, hidden=2048,
                                             intermediate_size=768, mode="ep", max_segments=1), **changes})
    bare.row_block = bare.segments = bare.variant = bare.weights_policy = None
    bare.pattern, bare.machine, bare.session = pattern, H200, SimpleNamespace(num_sms=132)
    bare._choices, bare._plain_fields, bare._tile_index = {}, {}, {name: index for index, name in enumerate(TILES)}
    return bare


def test_stages_are_bits_and_belong_to_one_pattern():
    bits = OPEN, GATHER, SCATTER, PULL, GEMM1, GEMM2, COMBINE
    assert bits == tuple(1 << i for i in range(7))
    assert STAGES["two_kernel"] | STAGES["serial"] == sum(bits) and STAGES["two_kernel"] & STAGES["serial"] == OPEN


@pytest.mark.parametrize("stages, pattern", [
    (GATHER, "two_kernel"), (OPEN | GATHER, "two_kernel"), (SCATTER, "two_kernel"), (GEMM1, "serial"), (OPEN | COMBINE, "serial"),
    (OPEN | PULL | COMBINE, "serial")])
def test_stages_say_their_pattern(stages, pattern):
    assert layer("two_kernel").pattern_of(64, stages) == layer("serial").pattern_of(64, stages) == pattern


def test_auto_asks_the_planner_for_each_number_of_tokens():
    auto = layer()
    large = layer(num_experts=256, hidden=7168, intermediate_size=2048)
    assert [auto.pattern_of(tokens) for tokens in (0, 1, 64, 2048)] == ["two_kernel"] * 4
    assert [large.pattern_of(tokens) for tokens in (0, 1, 64, 2048)] == ["two_kernel", "two_kernel", "serial", "two_kernel"]
    assert large.pattern_of(64, OPEN) == "serial" and layer("two_kernel").pattern_of(64, OPEN) == "two_kernel"
    assert auto._choices[2048].ceiling > 1.2


def test_auto_in_e4m3_goes_by_the_rows_of_an_expert():
    """Of mixtral-8x7b: 1536 from 3072 tokens of a rank on."""
    mixtral = layer(num_experts=8, top_k=2, hidden=4096, intermediate_size=14336, dtype="float8_e4m3fn")
    assert [mixtral.pattern_of(tokens) for tokens in (0, 64, 3071, 3072, 8192)] == [*["two_kernel"] * 3, "serial", "serial"]
    assert "rows an expert" in mixtral.choice(64).why


@pytest.mark.parametrize("tokens, first, second", [
    (1, "64x128_s4_p2_c1", "64x128_s4_p2_c1"), (64, "64x128_s4_p2_c1", "64x128_s4_p2_c1"),
    (512, "64x256_s5_w2_c2", "64x256_s5_w2_c2"), (2048, "128x256_s4_c2", "128x256_s4_c2")])
def test_tiles_follow_the_rows_of_an_expert(tokens, first, second):
    qwen = layer("serial")
    chosen = qwen.tiles(tokens)
    assert (chosen[0].name, chosen[1].name) == (first, second)
    fields = qwen._plain(tokens)
    assert fields["gemm1_tile"] == list(TILES).index(first) and fields["gemm2_tile"] == list(TILES).index(second)
    assert fields["passes"] == 1 and fields["gemm1_policy"] in (0, 1)


def test_fused_calls_keep_weights_in_cache_where_they_are_read_again():
    qwen = layer("two_kernel")
    assert [qwen._policy(tokens) for tokens in (0, 64, 256, 300, 8192)] == [1, 1, 1, 0, 0]
    qwen.weights_policy = 0
    assert qwen._policy(64) == 0


@pytest.mark.parametrize("tokens, first, second", [
    (1, "64x256_s5_w1_c1", "64x128_s8_w1_c1"), (64, "64x256_s5_w1_c1", "64x128_s8_w1_c1"),
    (256, "64x256_s5_w1_c1", "64x128_s8_w1_c1"), (512, "128x256_s4_c1", "128x256_s4_c1"), (8192, "128x256_s4_c1", "128x256_s4_c1")])
def test_e4m3_takes_the_tiles_of_the_engine_in_the_row_blocks_of_the_fused_pattern(tokens, first, second):
    qwen = layer("serial", dtype="float8_e4m3fn")
    qwen._tile_index = {name: index for index, name in enumerate(("128x256_s4_c1", "64x256_s5_w1_c1", "64x128_s8_w1_c1"))}
    assert tuple(tile.name for tile in qwen.tiles(tokens)) == (first, second)
    assert qwen.variant_of(tokens).row_block == int(first.split("x")[0])
    fields = qwen._plain(tokens)
    assert fields["gemm1_tile"] == qwen._tile_index[first] and fields["gemm2_tile"] == qwen._tile_index[second]
    qwen.row_block = 128
    assert qwen.tiles(tokens)[1].name == "128x256_s4_c1"


def test_few_tiles_are_narrower():
    mixtral = layer("serial", top_k=2, num_experts=8, hidden=4096, intermediate_size=14336)
    assert mixtral.tiles(512)[1].name == "128x128_s6_c2"


@pytest.mark.parametrize("name", TILES)
@pytest.mark.parametrize("tokens", [0, 1, 100, 512, 8192])
def test_task_lists_have_room_for_every_tile(name, tokens):
    assert TILES[name][1] >= MIN_COLUMN_BLOCK
    first, second = layer().tiles(tokens)
    assert TILES[first.name][0] == TILES[second.name][0] in ROW_BLOCKS


def slab(tiles: torch.Tensor, col_block: int, block_n: int, part: int, panel: int, num_panels: int) -> torch.Tensor:
    """What a loader gets: rows of one expert's tiles from where weights_at of engine/gemm_memory.cuh points, zeros outside."""
    rows = tiles.reshape(-1, TILE_COLS)
    blocks, size = TILE_ROWS // block_n, block_n // 2
    first = (col_block // blocks * num_panels + panel) * TILE_ROWS + col_block % blocks * block_n + part * size
    if panel >= num_panels:
        first = len(rows)
    return torch.nn.functional.pad(rows, (0, 0, 0, 2 * TILE_ROWS))[first:first + size]


@pytest.mark.parametrize("block_n", [128, 256])
@pytest.mark.parametrize("n, k", [(256, 64), (520, 264), (1536, 2048), (404, 130), (128, 64)])
def test_krn_22_narrow_tiles_find_their_weights_in_the_wide_ones(block_n, n, k):
    weights = torch.randn(1, n, k, generator=torch.Generator().manual_seed(n + k))
    tiles, num_panels = tiled(weights)[0], -(-k // TILE_COLS)
    padded = torch.nn.functional.pad(weights[0], (0, 4 * TILE_COLS, 0, 2 * TILE_ROWS))
    for col_block in range(-(-n // block_n)):
        for panel in range(num_panels + num_panels % 2):  # stages of two panels may look one behind the end
            for part in range(2):
                first = col_block * block_n + part * block_n // 2
                want = padded[first:first + block_n // 2, panel * TILE_COLS:(panel + 1) * TILE_COLS]
                assert torch.equal(slab(tiles, col_block, block_n, part, panel, num_panels), want)
