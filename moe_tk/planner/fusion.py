"""Fused or serial: the two accounts of a call (ceiling, waves) and the rule that reads them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from moe_tk.planner.accounts import MIN_CEILING, MIN_WAVES, ceiling, waves
from moe_tk.planner.machine import Machine

ELEMENT_BYTES = 2     # bf16
SCALED_SPEED = 1458 / 795  # of an e4m3 GEMM with scales over a bf16 one, in short runs on an H200 (moe_tk/bench/floor.py)
# From how many rows an expert, on average, e4m3 calls are serial. Measured (docs/performance.md): with 2048 and 4096 they were 5 %
# shorter than fused ones, whose GEMMs pay for gates and pushes; with 1024 2 % longer.
SERIAL_SCALED_ROWS = 1536
LARGE_TILE_ROWS = 48  # mean rows of an expert from which fused GEMMs on CUDA use row blocks of 128, of 64 below
SERIAL_LARGE_TILE_ROWS = 96  # the same for the GEMMs of the serial pattern, whose 64 x 256 tiles share weights in clusters
COLUMN_BLOCK = 256    # of the wide fused tiles: in these the waves are counted, whatever tiles a call takes
# From times of both patterns (docs/performance.md): at T = 64 the fused call of qwen3-30b-a3b, whose weights take 132 us, was
# 5 us shorter, that of seed (526) equal, of deepseek-v4-flash (1334) 10 us longer and of deepseek-v3 (2412) 20.
FEW_ROWS_LOSS = 0.011        # of the time of the weights
SERIAL_LAUNCHES_S = 7e-6
SAMPLES = (16, 64, 256, 512, 1024, 2048, 4096, 8192)  # tokens of a rank for which a plan is explained


def mean_rows(world: int, tokens: int, top_k: int, num_experts: int) -> float:
    """Rows of an expert on average, with `tokens` tokens on each rank."""
    return world * tokens * top_k / num_experts


@dataclass(frozen=True, slots=True)
class LayerWork:
    """One call as far as one rank can know it: its own tokens stand for everybody's, and experts get equal shares."""

    tokens: int              # of each rank
    world: int
    top_k: int
    num_experts: int
    local_experts: int
    hidden: int
    local_intermediate: int  # columns of this rank
    row_block: int
    column_block: int = COLUMN_BLOCK  # of GEMM 1
    scaled: bool = False  # e4m3 rows and weights; else bf16

    @property
    def element_bytes(self) -> int:
        """Of rows on their way and of weights."""
        return 1 if self.scaled else ELEMENT_BYTES

    @property
    def expert_rows(self) -> float:
        """Rows of an expert, on average."""
        return mean_rows(self.world, self.tokens, self.top_k, self.num_experts)

    @property
    def pairs(self) -> float:
        """(token, expert) rows that this rank computes."""
        return self.world * self.tokens * self.top_k * self.local_experts / self.num_experts

    @property
    def touched_experts(self) -> float:
        """Local experts that get a row, on average."""
        drawn = self.world * self.tokens * self.top_k
        return self.local_experts * (1 - (1 - 1 / self.num_experts) ** drawn)

    @property
    def moved_rows(self) -> float:
        """Rows that this rank gets from others, and partial rows that it sends back: tokens with a local expert."""
        chance = 1 - (1 - self.local_experts / self.num_experts) ** self.top_k
        return (self.world - 1) * self.tokens * chance

    @property
    def row_blocks(self) -> float:
        """Row blocks on average: an expert's last one is half full."""
        touched = self.touched_experts
        return touched * max(1.0, self.pairs / touched / self.row_block + 0.5) if touched else 0.0

    @property
    def tasks(self) -> int:
        """Tiles of GEMM 1."""
        return math.ceil(self.row_blocks) * math.ceil(2 * self.local_intermediate / self.column_block)


def row_block_of(world: int, tokens: int, top_k: int, num_experts: int, large_from: int = LARGE_TILE_ROWS) -> int:
    """Slots of a row block of a call on CUDA, by the mean number of rows of an expert."""
    return 128 if mean_rows(world, tokens, top_k, num_experts) >= large_from else 64


@dataclass(frozen=True, slots=True)
class Choice:
    """`pattern` of a call, why, and the accounts behind it (seconds)."""

    pattern: str  # "two_kernel" | "serial"
    why: str
    compute_s: float
    move_s: float
    ceiling: float
    waves: float

    def __str__(self) -> str:
        return (f"{self.pattern}: {self.why} (compute {self.compute_s * 1e6:.0f} us, move {self.move_s * 1e6:.0f} us, ceiling "
                f"{self.ceiling:.2f}, {self.waves:.1f} waves)")


def compute_seconds(work: LayerWork, machine: Machine) -> float:
    """Both GEMMs alone: the FLOPs or the weights, whichever takes longer."""
    matrix = 3 * work.hidden * work.local_intermediate  # gate, up and down of one expert
    flops = 2 * matrix * work.pairs
    weights = matrix * work.element_bytes * work.touched_experts
    tflops = machine.tflops * (SCALED_SPEED if work.scaled else 1)
    return max(flops / (tflops * 1e12), weights / (machine.hbm_gbs * 1e9))


def move_seconds(work: LayerWork, machine: Machine) -> float:
    """Rows there and partial rows (bf16) back: over the wire, or written to and read from their slots, whichever takes longer."""
    both_ways = work.hidden * (work.element_bytes + ELEMENT_BYTES)
    return both_ways * max(work.moved_rows / (machine.wire_gbs * 1e9), work.pairs / (machine.hbm_gbs * 1e9))


def fused_loss_seconds(work: LayerWork, compute_s: float) -> float:
    """By how much the fused GEMMs are longer than plain ones. With blocks of 64 rows they are bound by reading weights, and take a
    part more for them; with blocks of 128 rows nothing was lost."""
    return FEW_ROWS_LOSS * compute_s if work.row_block == 64 else 0.0


def serial_extra_seconds(work: LayerWork, machine: Machine) -> float:
    """What only a serial call does: two more launches, and rows written to their slots, from which its GEMM 1 reads them."""
    return SERIAL_LAUNCHES_S + 2 * work.hidden * ELEMENT_BYTES * work.pairs / (machine.hbm_gbs * 1e9)


def choose_fusion(work: LayerWork, machine: Machine) -> Choice:
    """The pattern of a call. Below one wave of tiles, or with a ceiling under MIN_CEILING, there is nothing to overlap with: then
    serial, if the fused GEMMs lose more than a serial call does besides. Else two_kernel. e4m3: by the rows of an expert alone."""
    compute_s, move_s = compute_seconds(work, machine), move_seconds(work, machine)
    most, rounds = ceiling(compute_s, move_s), waves(work.tasks, machine.sms)
    if work.scaled:
        pattern = "serial" if work.expert_rows >= SERIAL_SCALED_ROWS else "two_kernel"
        why = f"e4m3 calls are serial from {SERIAL_SCALED_ROWS} rows an expert on, here {work.expert_rows:.0f}"
        return Choice(pattern, why, compute_s, move_s, most, rounds)
    lost_s, extra_s = fused_loss_seconds(work, compute_s), serial_extra_seconds(work, machine)
    if rounds >= MIN_WAVES and most >= MIN_CEILING:
        pattern, why = "two_kernel", "there is time to hide"
    else:
        little = f"less than {MIN_WAVES:g} wave of tiles"
        if rounds >= MIN_WAVES:
            little = f"perfect overlap gains less than {MIN_CEILING:g}"
        pattern = "serial" if lost_s > extra_s else "two_kernel"
        why = f"{little}, fused GEMMs lose {lost_s * 1e6:.0f} us, serial calls {extra_s * 1e6:.0f}"
    return Choice(pattern, why, compute_s, move_s, most, rounds)


def explain_fusion(choose: Callable[[int], Choice], max_tokens: int, samples: Iterable[int] = SAMPLES) -> tuple[str, ...]:
    """One line for each sampled number of tokens up to max_tokens, which is always there."""
    counts = sorted({tokens for tokens in samples if tokens < max_tokens} | {max_tokens})
    return tuple(f"auto with {tokens} tokens: {choose(tokens)}" for tokens in counts)
