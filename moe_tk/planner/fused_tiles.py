"""Tiles of the two fused GEMMs on CUDA: which pairs are compiled, and which one a call takes, from sizes alone."""

from __future__ import annotations

import math
from dataclasses import dataclass

WIDE, NARROW = 256, 128  # columns of a tile
# Blocks of 64 rows that an expert may have, on average, for its GEMMs to be bound by reading weights: there narrow tiles were
# faster, as in the serial pattern (qwen3-30b-a3b at T = 512: 253 us a call with wide ones, 280 with narrow ones).
FEW_BLOCKS = {"bfloat16": 1, "float8_e4m3fn": 2}
# From how many rows an expert, on average, and how many intermediate columns of a rank e4m3 rows are brought to their slots before
# GEMM 1. What that takes goes with rows times H; what GEMM 1 saves, with rows times H times these columns. Measured: calls of
# qwen3-30b-a3b (768 columns) got up to 5 % longer, those of mixtral-8x7b (14336) up to 8 % shorter (docs/performance.md).
PLACED_ROWS, PLACED_INTERMEDIATE = 128, 1536
PLACED_HIDDEN = 512, 16384  # H for which rows and scales fit (tk_kernels/nvlink/place_rows.cuh)


@dataclass(frozen=True, slots=True)
class FusedVariant:
    """A compiled pair of fused GEMMs."""

    name: str
    row_block: int
    gather_cols: int   # columns of a tile of GEMM 1, which has 2 I of them
    scatter_cols: int  # ... of GEMM 2, which has H
    placed: bool = False  # rows are brought to their slots first, instead of gathered by GEMM 1


# By index, as fused_gemm.cu and fused_gemm_fp8.cu have them; compared when the module is loaded. SwiGLU of e4m3 wants 256 columns.
FUSED_VARIANTS = {
    "bfloat16": (FusedVariant("64x256", 64, 256, 256), FusedVariant("128x256", 128, 256, 256),
                 FusedVariant("64x128", 64, 128, 128)),
    "float8_e4m3fn": (FusedVariant("64x256", 64, 256, 256), FusedVariant("128x256", 128, 256, 256),
                      FusedVariant("64x256_128", 64, 256, 128), FusedVariant("128x256_placed", 128, 256, 256, True)),
}


def variant_index(dtype: str, row_block: int, scatter_cols: int = WIDE, placed: bool = False) -> int:
    """Index of the variant with these tiles."""
    return next(index for index, variant in enumerate(FUSED_VARIANTS[dtype])
                if (variant.row_block, variant.scatter_cols, variant.placed) == (row_block, scatter_cols, placed))


def expected_blocks(groups: int, rows: float, row_block: int) -> int:
    """Row blocks of `groups` groups of `rows` rows on average: a group's last one is half full."""
    return math.ceil(groups * max(1.0, rows / row_block + 0.5))


def choose_variant(dtype: str, *, row_block: int, groups: int, rows: float, hidden: int, intermediate: int) -> int:
    """Index of the variant of a call with `groups` groups on this rank (at least 1) of `rows` rows each on average, for H `hidden`
    and I `intermediate` of this rank.

    Blocks of 128 rows always take wide tiles: narrow ones in GEMM 2 of mixtral-8x7b at T = 512, which has 1.2 rounds of wide tiles,
    made a TP call 789 us long instead of 728, and an EP call 778 instead of 786, in two runs with other changes between them.
    """
    narrow = row_block == 64 and expected_blocks(groups, rows, row_block) <= FEW_BLOCKS[dtype] * groups
    return variant_index(dtype, row_block, NARROW if narrow else WIDE, _placed(dtype, row_block, rows, hidden, intermediate))


def _placed(dtype: str, row_block: int, rows: float, hidden: int, intermediate: int) -> bool:
    if dtype != "float8_e4m3fn" or row_block != 128 or not PLACED_HIDDEN[0] <= hidden <= PLACED_HIDDEN[1]:
        return False
    return rows >= PLACED_ROWS and intermediate >= PLACED_INTERMEDIATE
