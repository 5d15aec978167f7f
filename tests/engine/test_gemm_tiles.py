"""The choice of tiles and the preparation of weights: pure functions."""

from __future__ import annotations

import pytest
import torch

from moe_tk.errors import ArgumentError
from moe_tk.runtime.gemm_tiles import POLICY_EVICT_FIRST, choose_tile
from moe_tk.weights.gemm import gate_up_order, interleave_gate_up, quantise_weights, scale_pairs


def pick(dtype="bf16", **changes):
    facts = {"row_block": 128, "num_slots": 65536, "num_experts": 32, "columns": 6144, "activation": False, "num_sms": 132}
    return choose_tile(dtype, **(facts | changes))


def test_large_groups_take_the_largest_tile():
    assert pick().name == "128x256_s4_c2"
    assert pick("e4m3").name == "128x256_s4_c1"


def test_few_rows_take_narrow_tiles_that_read_weights_once():
    choice = pick(row_block=64, num_slots=32 * 64)
    assert (choice.name, choice.weights_policy) == ("64x128_s4_p2_c1", POLICY_EVICT_FIRST)
    assert pick("e4m3", row_block=64, num_slots=2048, activation=True).name == "64x256_s5_w1_c1"


def test_under_two_waves_narrower_tiles():
    assert pick(num_slots=1536, num_experts=4, columns=4096).name == "128x128_s6_c2"


def test_other_row_blocks_are_refused():
    with pytest.raises(ArgumentError, match="64 or 128"):
        pick(row_block=96)


@pytest.mark.parametrize("quantised", [False, True])
def test_gate_up_order_is_a_permutation_and_pairs_stay_together(quantised):
    order = gate_up_order(256, quantised)
    assert torch.equal(order.sort().values, torch.arange(512))
    gate, up = order.view(-1, 2, 8)[:, 0], order.view(-1, 2, 8)[:, 1]
    assert torch.equal(up, gate + 256)
    if quantised:  # a thread q of 4 holds columns 2q, 2q + 1 of groups 2b and 2b + 1: four neighbours
        held = gate.view(-1, 2, 4, 2).transpose(1, 2).reshape(-1, 4)
        assert torch.equal(held, torch.arange(256).view(-1, 4))
    else:
        assert torch.equal(gate.reshape(-1), torch.arange(256))


def test_interleaving_refuses_widths_between_steps():
    with pytest.raises(ArgumentError, match="nearest: 128 or 256"):
        interleave_gate_up(torch.zeros(1, 192, 64, dtype=torch.bfloat16))


def test_scale_pairs_follow_their_columns():
    w13 = torch.randn(2, 512, 256)
    quantised, scales = quantise_weights(w13)
    pairs = scale_pairs(scales, gate_up=True)
    assert pairs.shape == (2, 4, 2, 2)
    for row, source in enumerate(gate_up_order(256, True).tolist()):
        assert torch.equal(pairs[:, row // 128, :, row // 8 % 2], scales[:, source // 128])
