"""Tiles of the two fused GEMMs on CUDA: which pairs are compiled, and which one a call takes, from sizes alone."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

WIDE, NARROW = 256, 128  # columns of a tile
NARROW_COST = 1.08       # of a column in narrow tiles, which load more for each FLOP: below this gain wide ones stay
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
                 FusedVariant("64x128", 64, 128, 128), FusedVariant("128x256_128", 128, 256, 128)),
    "float8_e4m3fn": (FusedVariant("64x256", 64, 256, 256), FusedVariant("128x256", 128, 256, 256),
                      FusedVariant("64x256_128", 64, 256, 128), FusedVariant("128x256_128", 128, 256, 128)),
}


def variant_index(dtype: str, row_block: int, scatter_cols: int = WIDE) -> int:
    """Index of the variant with these tiles."""
    return next(index for index, variant in enumerate(FUSED_VARIANTS[dtype])
                if (variant.row_block, variant.scatter_cols) == (row_block, scatter_cols))


def expected_blocks(groups: int, rows: float, row_block: int) -> int:
    """Row blocks of `groups` groups of `rows` rows on average: a group's last one is half full."""
    return math.ceil(groups * max(1.0, rows / row_block + 0.5))


def narrow_is_shorter(groups: int, rows: float, row_block: int, columns: int, sms: int) -> bool:
    """Whether GEMM 2 with `columns` columns is shorter in narrow tiles: by the rounds of tiles, each as long as a tile is wide.

    The last block of a group is there or not, so that the number of blocks strays from its mean by sqrt(groups) / 2; a gain has to
    be there on the average over it, or a choice would hang on whether the last round of the mean is empty.
    """
    mean = expected_blocks(groups, rows, row_block)
    stray = round(math.sqrt(groups) / 2) if rows > row_block / 2 else 0  # with fewer rows each group has one block

    def length(tile: int) -> int:
        tiles = -(-columns // tile)
        return sum(-(-blocks * tiles // sms) * tile for blocks in (mean - stray, mean, mean + stray))

    return length(NARROW) * NARROW_COST < length(WIDE)


@functools.lru_cache(maxsize=1024)
def choose_variant(dtype: str, *, row_block: int, groups: int, rows: float, hidden: int, sms: int) -> int:
    """Index of the variant of a call with `groups` groups on this rank (at least 1) of `rows` rows each on average, and H = hidden;
    sms: multiprocessors in use."""
    if row_block == 64:
        narrow = expected_blocks(groups, rows, row_block) <= FEW_BLOCKS[dtype] * groups
    else:
        narrow = narrow_is_shorter(groups, rows, row_block, hidden, sms)
    return variant_index(dtype, row_block, NARROW if narrow else WIDE)
