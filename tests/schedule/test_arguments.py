"""build_tables refuses what cannot work in one line that says what was seen and what was wanted."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from moe_tk.errors import ArgumentError, ArgumentTypeError, ScheduleError
from moe_tk.schedule import build_tables, expert_range, local_experts, shard_range

GOOD = dict(topk_ids=torch.zeros(8, 2, dtype=torch.int32), token_counts=[4, 4], world=2, rank=0, num_experts=4,
            mode="ep", row_block=4)
REFUSED = [
    (dict(topk_ids=[[0, 1]]), ArgumentTypeError, "topk_ids must be a tensor, got list"),
    (dict(topk_ids=torch.zeros(8, 2)), ArgumentTypeError, "topk_ids has dtype torch.float32, wanted torch.int32 or"),
    (dict(topk_ids=torch.zeros(8, 2, dtype=torch.int16)), ArgumentTypeError, "topk_ids has dtype torch.int16"),
    (dict(topk_ids=torch.zeros(8, 2, dtype=torch.uint8)), ArgumentTypeError, "topk_ids has dtype torch.uint8"),
    (dict(topk_ids=torch.zeros(8, dtype=torch.int32)), ArgumentError, r"topk_ids has shape \(8,\), wanted \[world"),
    (dict(topk_ids=torch.zeros(8, 0, dtype=torch.int32)), ArgumentError, r"topk_ids has shape \(8, 0\)"),
    (dict(topk_ids=torch.zeros(7, 2, dtype=torch.int32)), ArgumentError, "7 rows, wanted a multiple of world=2"),
    (dict(token_counts=[4]), ArgumentError, "token_counts has 1 entries, wanted world=2"),
    (dict(token_counts=[4, 5]), ArgumentError, r"token_counts\[1\] is 5, wanted 0..4"),
    (dict(token_counts=[-1, 4]), ArgumentError, r"token_counts\[0\] is -1, wanted 0..4"),
    (dict(token_counts=torch.ones(2)), ArgumentTypeError, "token_counts has dtype torch.float32"),
    (dict(world=0), ArgumentError, "world must be an integer >= 1, got 0"),
    (dict(rank=2), ArgumentError, "rank must be in 0..1 for world=2, got 2"),
    (dict(rank=-1), ArgumentError, "rank must be in 0..1"),
    (dict(num_experts=0), ArgumentError, "num_experts must be an integer >= 1, got 0"),
    (dict(mode="dp"), ArgumentError, "mode must be one of ep, tp, got 'dp'"),
    (dict(row_block=0), ArgumentError, "row_block must be an integer >= 1, got 0"),
    (dict(segments=0), ArgumentError, "segments must be an integer >= 1, got 0"),
    (dict(job_chunk=0), ArgumentError, "job_chunk must be an integer >= 1, got 0"),
    (dict(impl="fast"), ArgumentError, "impl must be one of vectorised, golden, got 'fast'"),
    (dict(segments=2**31), ScheduleError, "number of groups .* does not fit the int32 tables"),
]


@pytest.mark.parametrize("change, error, message", REFUSED)
def test_refusals(change, error, message):
    build_tables(**GOOD)
    with pytest.raises(error, match=message) as caught:
        build_tables(**{**GOOD, **change})
    assert "\n" not in str(caught.value)


def test_world_has_a_stated_limit():
    with pytest.raises(ArgumentError, match="world must be in 1..63, got 64"):
        build_tables(torch.zeros(64, 2, dtype=torch.int32), token_counts=[1] * 64, world=64, rank=0, num_experts=4,
                     mode="ep", row_block=4)
    ids = torch.arange(63, dtype=torch.int32).reshape(63, 1)
    tables = build_tables(ids.flip(0), token_counts=[1] * 63, world=63, rank=0, num_experts=63, mode="ep", row_block=4)
    assert tables.contributors.tolist() == [1 << 62]


def test_token_counts_may_be_a_tensor():
    for dtype in (torch.int32, torch.int64):
        tables = build_tables(**{**GOOD, "token_counts": torch.tensor([4, 1], dtype=dtype)})
        assert tables.token_counts.tolist() == [4, 1]


def test_ownership_refuses():
    with pytest.raises(ArgumentError, match="intermediate must be an integer >= 1, got 0"):
        shard_range(0, 2, 0)
    with pytest.raises(ArgumentError, match="rank must be in 0..1 for world=2, got 5"):
        expert_range(8, 2, 5)
    assert local_experts(8, 2, 1, "tp") == (0, 8) and local_experts(8, 2, 1, "ep") == (4, 4)


def test_to_another_device():
    tables = build_tables(**GOOD)
    assert tables.to("cpu") is tables
    there = tables.to("meta")
    assert there.device.type == "meta" and there.num_slots == tables.num_slots


def test_sizes_and_ownership_need_no_torch():
    code = ("import sys; from moe_tk.schedule import expert_range, max_slots; max_slots(2, 8, 2, 4, 1, 8); "
            "assert 'torch' not in sys.modules")
    subprocess.run([sys.executable, "-c", code], check=True)


def test_public_names_resolve():
    import moe_tk.schedule as schedule

    for name in schedule.__all__:
        assert getattr(schedule, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        schedule.nothing  # noqa: B018
