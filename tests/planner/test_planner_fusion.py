"""The rule that chooses between fused and serial: the accounts of known shapes, its two limits, and what it explains."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_tk.planner import LayerWork, choose_fusion, explain_fusion, machine_of, row_block_of
from moe_tk.planner.accounts import MIN_CEILING, MIN_WAVES, ceiling
from moe_tk.planner.fusion import compute_seconds, fused_loss_seconds, move_seconds, serial_extra_seconds
from moe_tk.planner.machine import H200

SHAPES = {"seed": (4096, 3072, 64, 8), "qwen3-30b-a3b": (2048, 768, 128, 8), "deepseek-v3": (7168, 2048, 256, 8)}


def work(tokens: int, shape: str = "seed", mode: str = "ep", world: int = 2) -> LayerWork:
    hidden, inter, experts, top_k = SHAPES[shape]
    local, columns = (experts // world, inter) if mode == "ep" else (experts, inter // world)
    return LayerWork(tokens=tokens, world=world, top_k=top_k, num_experts=experts, local_experts=local, hidden=hidden,
                     local_intermediate=columns, row_block=row_block_of(world, tokens, top_k, experts))


@pytest.mark.parametrize("tokens, us", [(64, 526), (512, 526), (2048, 1556), (8192, 6224)])
@pytest.mark.parametrize("mode", ["ep", "tp"])
def test_compute_is_the_larger_of_flops_and_touched_weights(tokens, us, mode):
    assert compute_seconds(work(tokens, mode=mode), H200) * 1e6 == pytest.approx(us, rel=0.01)


def test_few_tokens_touch_few_experts():
    one = work(1)
    assert 7 < one.touched_experts < 8 and one.pairs == 8  # 16 pairs of two ranks, half of them here
    assert compute_seconds(one, H200) == pytest.approx(one.touched_experts * 3 * 4096 * 3072 * 2 / 4.59e12)


def test_rows_move_over_the_wire_or_through_the_slots():
    # EP over two ranks with k = 8: all tokens but 1 in 256 have a local expert; 64 MiB there and back at 364 GB/s.
    assert move_seconds(work(8192), H200) == pytest.approx(2 * 8192 * 8192 * (1 - 1 / 256) / 364e9)
    # TP: every rank wants every token, and writes each to all its k slots: that takes longer than the wire.
    assert move_seconds(work(8192, mode="tp"), H200) == pytest.approx(2 * 16384 * 8 * 8192 / 4.59e12)
    assert move_seconds(work(8192, world=1), H200) > 0 and work(8192, world=1).moved_rows == 0


@pytest.mark.parametrize("tokens, shape, pattern, why", [
    (0, "seed", "two_kernel", "less than 1 wave"), (1, "qwen3-30b-a3b", "two_kernel", "less than 1 wave"),
    (64, "deepseek-v3", "serial", "less than 1.05"), (64, "seed", "two_kernel", "less than 1.05"),
    (64, "qwen3-30b-a3b", "two_kernel", "less than 1.05"), (512, "deepseek-v3", "two_kernel", "less than 1.05")])
def test_where_there_is_nothing_to_hide_the_shorter_estimate_decides(tokens, shape, pattern, why):
    choice = choose_fusion(work(tokens, shape), H200)
    assert choice.pattern == pattern and why in choice.why
    assert ("wave" in why) == (choice.waves < MIN_WAVES)
    assert f"ceiling {choice.ceiling:.2f}" in str(choice) and "waves" in str(choice)


def test_fuses_where_there_is_time_to_hide():
    choice = choose_fusion(work(2048, "qwen3-30b-a3b"), H200)
    assert choice.pattern == "two_kernel" and choice.ceiling > 1.2 and choice.waves > 5


@pytest.mark.parametrize("tokens, pattern", [(64, "two_kernel"), (512, "two_kernel"), (2048, "two_kernel"), (8192, "serial")])
def test_e4m3_calls_with_many_rows_an_expert_are_serial(tokens, pattern):
    choice = choose_fusion(dataclasses.replace(work(tokens), scaled=True), H200)
    assert choice.pattern == pattern and f"here {tokens // 4}" in choice.why
    assert choice.ceiling == ceiling(choice.compute_s, choice.move_s)


def test_e4m3_halves_the_weights_and_the_rows_that_are_sent():
    few, many = work(64), work(8192)
    scaled = [dataclasses.replace(call, scaled=True) for call in (few, many)]
    assert compute_seconds(scaled[0], H200) == compute_seconds(few, H200) / 2
    assert compute_seconds(many, H200) / compute_seconds(scaled[1], H200) == pytest.approx(1458 / 795)
    assert move_seconds(scaled[1], H200) == move_seconds(many, H200) * 3 / 4  # partial rows are bf16


def test_a_slower_wire_makes_fusion_worth_while():
    slow = dataclasses.replace(H200, wire_gbs=5)
    few = work(64, "deepseek-v3")
    assert choose_fusion(few, H200).pattern == "serial" and choose_fusion(few, slow).pattern == "two_kernel"


@settings(deadline=None, max_examples=200)
@given(tokens=st.integers(0, 8192), world=st.sampled_from([1, 2, 4, 8]), mode=st.sampled_from(["ep", "tp"]),
       shape=st.sampled_from(sorted(SHAPES)))
def test_every_call_has_a_choice_that_its_own_accounts_explain(tokens, world, mode, shape):
    choice = choose_fusion(work(tokens, shape, mode, world), H200)
    call = work(tokens, shape, mode, world)
    hides = choice.waves >= MIN_WAVES and choice.ceiling >= MIN_CEILING
    loses = fused_loss_seconds(call, choice.compute_s) > serial_extra_seconds(call, H200)
    assert choice.pattern == ("serial" if not hides and loses else "two_kernel")
    assert choice.ceiling == ceiling(choice.compute_s, choice.move_s) and 1 <= choice.ceiling <= 2


def test_machines_are_known_by_name_and_scaled_by_the_multiprocessors_in_use():
    assert machine_of("NVIDIA H200", 132) == H200
    assert machine_of("NVIDIA H200", 66).tflops == H200.tflops / 2 and machine_of("NVIDIA H200", 66).hbm_gbs == H200.hbm_gbs
    assert machine_of("NVIDIA GH200 480GB", 132).name == "GH200"
    assert machine_of("NVIDIA H100 80GB HBM3", 132).hbm_gbs < H200.hbm_gbs
    other = machine_of("Some GPU", 100)
    assert other.name == "Some GPU" and "unknown" in other.origin


def test_explains_samples_up_to_the_largest_call():
    lines = explain_fusion(lambda tokens: choose_fusion(work(tokens, "qwen3-30b-a3b"), H200), 700)
    assert [line.split(" tokens")[0] for line in lines] == [f"auto with {n}" for n in (16, 64, 256, 512, 700)]
    assert all("two_kernel: " in line and "ceiling" in line for line in lines)
