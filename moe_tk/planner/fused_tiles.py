"""Tiles of the two fused GEMMs on CUDA: which pairs are compiled, and which one a call takes, from sizes alone."""

from __future__ import annotations

import math
from dataclasses import dataclass

WIDE, NARROW = 256, 128  # columns of a tile
# Blocks of 64 rows that an expert may have, on average, for its GEMMs to be bound by reading weights: there narrow tiles were
# faster, as in the serial pattern (qwen3-30b-a3b at T = 512: 253 us a call with wide ones, 280 with narrow ones).
FEW_BLOCKS = {"bfloat16": 1, "float8_e4m3fn": 2}


@dataclass(frozen=True, slots=True)
class FusedVariant:
    """A compiled pair of fused GEMMs."""

    name: str
    row_block: int
    gather_cols: int   # columns of a tile of GEMM 1, which has 2 I of them
    scatter_cols: int  # ... of GEMM 2, which has H


# By index, as fused_gemm.cu and fused_gemm_fp8.cu have them; compared when the module is loaded. SwiGLU of e4m3 wants 256 columns.
FUSED_VARIANTS = {
    "bfloat16": (FusedVariant("64x256", 64, 256, 256), FusedVariant("128x256", 128, 256, 256),
                 FusedVariant("64x128", 64, 128, 128)),
    "float8_e4m3fn": (FusedVariant("64x256", 64, 256, 256), FusedVariant("128x256", 128, 256, 256),
                      FusedVariant("64x256_128", 64, 256, 128)),
}


def variant_index(dtype: str, row_block: int, scatter_cols: int = WIDE) -> int:
    """Index of the variant with these tiles."""
    return next(index for index, variant in enumerate(FUSED_VARIANTS[dtype])
                if (variant.row_block, variant.scatter_cols) == (row_block, scatter_cols))


def expected_blocks(groups: int, rows: float, row_block: int) -> int:
    """Row blocks of `groups` groups of `rows` rows on average: a group's last one is half full."""
    return math.ceil(groups * max(1.0, rows / row_block + 0.5))


def choose_variant(dtype: str, *, row_block: int, groups: int, rows: float) -> int:
    """Index of the variant of a call with `groups` groups on this rank (at least 1) of `rows` rows each on average.

    Blocks of 128 rows always take wide tiles: narrow ones in GEMM 2 of mixtral-8x7b at T = 512, which has 1.2 rounds of wide tiles,
    made a TP call 789 us long instead of 728, and an EP call 778 instead of 786, in two runs with other changes between them.
    """
    narrow = row_block == 64 and expected_blocks(groups, rows, row_block) <= FEW_BLOCKS[dtype] * groups
    return variant_index(dtype, row_block, NARROW if narrow else WIDE)
