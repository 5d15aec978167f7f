"""Which tile configuration the grouped GEMM uses: a pure function of shapes. docs/engine.md has the measurements behind it."""

from __future__ import annotations

from dataclasses import dataclass

from moe_tk.errors import ArgumentError

ROW_BLOCKS = (64, 128)  # what expert offsets may be padded to
POLICY_NORMAL, POLICY_EVICT_FIRST = 0, 1


@dataclass(frozen=True, slots=True)
class TileChoice:
    """`name` of a compiled configuration, the L2 policy of its weight loads, and why."""

    name: str
    weights_policy: int
    reason: str


def choose_tile(dtype: str, *, row_block: int, num_slots: int, num_experts: int, columns: int, activation: bool,
                num_sms: int) -> TileChoice:
    """dtype "bf16" or "e4m3"; row_block 64 or 128; num_slots capacity with padding; columns N of the weights.

    Raises ArgumentError when row_block has no configuration.
    """
    if row_block not in ROW_BLOCKS:
        raise ArgumentError(f"row_block is {row_block}; the wgmma engine computes blocks of 64 or 128 rows. Pad expert_offsets to "
                            "multiples of one of them.")
    blocks = max(num_slots // row_block, 1)
    if row_block == 64:
        if blocks <= 2 * num_experts:
            once = POLICY_EVICT_FIRST if blocks <= num_experts else POLICY_NORMAL
            if dtype == "e4m3":
                name = "64x256_s5_w1_c1" if activation else "64x128_s8_w1_c1"
                return TileChoice(name, once, "few rows an expert: bound by reading weights")
            return TileChoice("64x128_s4_p2_c1", once, "few rows an expert: bound by reading weights, 256 bytes of a row at a time")
        name = "64x256_s5_w1_c1" if dtype == "e4m3" else "64x256_s5_w2_c2"
        return TileChoice(name, POLICY_NORMAL, "blocks of 64 rows that share weights")
    if dtype == "e4m3":
        return TileChoice("128x256_s4_c1", POLICY_NORMAL, "promotion leaves the cluster no gain")
    if blocks * -(-columns // 256) < 2 * num_sms:
        return TileChoice("128x128_s6_c2", POLICY_NORMAL, "fewer than two waves of 128 x 256: narrower tiles balance better")
    return TileChoice("128x256_s4_c2", POLICY_NORMAL, "largest tile, neighbours share an operand by multicast")
