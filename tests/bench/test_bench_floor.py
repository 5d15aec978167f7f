"""Floors from routings that can be counted by hand."""

from __future__ import annotations

import pytest
import torch

from moe_tk.bench import routings
from moe_tk.bench.floor import Floor, MachineNumbers, count_traffic, floor_of
from moe_tk.bench.shapes import SHAPES, Shape

SHAPE = Shape("hand", 128, 32, 4, 2)  # ranks 0 and 1 own experts 0, 1 and 2, 3
# rank 0 has the first three tokens, rank 1 the others
IDS = torch.tensor([[0, 1], [0, 2], [3, -1], [0, 1], [-1, -1], [2, 9]], dtype=torch.int32)


def test_ep_counts_rows_of_the_busier_rank_and_each_row_on_the_wire_once():
    found = count_traffic(IDS, SHAPE, mode="ep", dtype="bf16", world=2)
    # rank 0 computes 0,1 | 0 | 0,1 = 5 pairs; rank 1 computes 2 | 3 | 2 = 3 pairs
    assert found.rows == 5 and found.touched == 2
    assert found.flops == 5 * 6 * 128 * 32
    assert found.weight_bytes == 2 * 3 * 128 * 32 * 2
    # to rank 0: token 3. To rank 1: tokens 1 and 2. Each comes back: 3 rows either way
    assert found.wire_bytes == 3 * 128 * 2


def test_tp_moves_every_token_that_has_an_expert_and_shares_the_columns():
    found = count_traffic(IDS, SHAPE, mode="tp", dtype="bf16", world=2)
    assert found.rows == 8 and found.touched == 4  # expert 9 and -1 are none
    assert found.flops == 8 * 6 * 128 * 16
    assert found.weight_bytes == 4 * 3 * 128 * 16 * 2
    assert found.wire_bytes == (3 + 2) * 128 * 2  # token 4 has no expert


def test_e4m3_rows_go_out_in_one_byte_with_scales_and_come_back_in_two():
    found = count_traffic(IDS, SHAPE, mode="ep", dtype="e4m3", world=2)
    assert found.weight_bytes == 2 * 3 * 128 * 32
    out, back = 128 + 4, 256
    assert found.wire_bytes == max(1 * out + 2 * back, 2 * out + 1 * back)


def test_one_rank_moves_nothing_and_an_idle_rank_does_not_matter():
    assert count_traffic(IDS, SHAPE, mode="ep", dtype="bf16", world=1).wire_bytes == 0
    idle = count_traffic(torch.zeros(4, 2, dtype=torch.int32), SHAPE, mode="ep", dtype="bf16", world=2)
    assert idle.rows == 8 and idle.touched == 1 and idle.wire_bytes == 2 * 256


def test_the_floor_is_the_largest_of_three_times():
    numbers = MachineNumbers(hbm_tbs=1.0, bf16_tflops=1.0, fp8_tflops=2.0, wire_gbs=1.0)
    found = count_traffic(IDS, SHAPE, mode="ep", dtype="bf16", world=2)
    floor = floor_of(found, numbers, "bf16")
    assert floor.weights_us == pytest.approx(2 * 3 * 128 * 32 * 2 / 1e6)
    assert floor.flops_us == pytest.approx(5 * 6 * 128 * 32 / 1e6)
    assert floor.wire_us == pytest.approx(3 * 256 / 1e3)
    assert floor.us == floor.wire_us and floor.bound == "wire"
    assert Floor(3.0, 2.0, 1.0).bound == "weights"


@pytest.mark.parametrize(("name", "tokens", "us"), [("seed", 64, 527), ("seed", 8192, 6237), ("qwen3-30b-a3b", 2048, 195)])
def test_floors_agree_with_those_of_the_machine_that_the_defaults_are_from(name, tokens, us):
    ids = routings.make("uniform", SHAPES[name], tokens=tokens, world=2).topk_ids
    found = count_traffic(ids, SHAPES[name], mode="ep", dtype="bf16", world=2)
    assert floor_of(found, MachineNumbers(), "bf16").us == pytest.approx(us, rel=0.02)
