"""Which back end protocol="auto" gets, from cards of imagined ranks; and what a real rank puts on its card."""

from __future__ import annotations

import pickle
import re

import pytest
import torch

import moe_tk
from moe_tk import back_end
from moe_tk.back_end import decide_back_end, rank_card
from moe_tk.errors import ArgumentError, TopologyError
from moe_tk.group import MESSAGE_BYTES, SINGLE
from moe_tk.planner.back_end import RankCard, choose_back_end

NCCL = "the group has an nccl back end"
SIZES = dict(num_experts=8, top_k=2, hidden_size=64, intermediate_size=32, max_tokens_per_rank=16)


def hopper(rank: int, world: int = 2, **changes) -> RankCard:
    links = {f"GPU-{other}": ("nvlink", True, "") for other in range(world) if other != rank}
    return RankCard(**{**dict(wants_cuda=True, why=NCCL, device=f"cuda:{rank}", capability=(9, 0), uuid=f"GPU-{rank}", machine="m",
                              links=links), **changes})


@pytest.mark.parametrize("world", [1, 2, 8])
def test_hopper_gpus_with_nvlink_between_all_get_nvlink(world):
    chosen = choose_back_end([hopper(rank, world) for rank in range(world)])
    assert chosen.protocol == "nvlink" and NCCL in chosen.reason
    assert world == 1 or "verified by probes" in chosen.reason


def test_links_that_no_probe_has_verified_are_said_to_be_so():
    cards = [hopper(0), hopper(1, links={"GPU-0": ("nvlink", False, "")})]
    chosen = choose_back_end(cards)
    assert chosen.protocol == "nvlink" and "as the driver says" in chosen.reason and "probe quick" in chosen.reason


NO_LINK = {"GPU-0": ("pcie", True, "GPUs 0 and 1 are connected by PCIe")}


@pytest.mark.parametrize("change, text", [
    (dict(capability=(8, 0)), r"rank 1: cuda:1 has compute capability 8\.0, wanted 9\.0"), (dict(capability=None), "unknown"),
    (dict(obstacle="torch sees no GPU"), "rank 1: torch sees no GPU"), (dict(machine="n"), "ranks 0 and 1 are on different mach"),
    (dict(uuid="GPU-0"), "ranks 0 and 1 share one GPU"), (dict(links=NO_LINK), "no usable NVLink between them: GPUs 0 and 1 are"),
    (dict(links={}), "nothing is known about the pair")])
def test_anything_else_stays_on_the_cpu_unless_a_gpu_was_named(change, text):
    chosen = choose_back_end([hopper(0), hopper(1, **change)])
    assert chosen.protocol == "shm" and re.search(text, chosen.reason), chosen.reason
    with pytest.raises(TopologyError, match=text):
        choose_back_end([hopper(0, named=True, why="device is cuda:0"), hopper(1, **change)])


def test_one_direction_without_nvlink_is_enough_to_stay():
    assert choose_back_end([hopper(0, links={"GPU-1": ("staged", True, "a probe failed")}), hopper(1)]).protocol == "shm"


def test_ranks_that_want_different_back_ends_all_raise():
    cpu = RankCard(False, "device is cpu")
    with pytest.raises(TopologyError, match=f"rank 1 is to run on a GPU .{NCCL}. but rank 0 is not .device is cpu"):
        choose_back_end([cpu, hopper(1)])
    assert choose_back_end([cpu, cpu]).protocol == "shm"


def test_cards_of_sixteen_gpus_fit_into_a_message():
    links = {f"GPU-{i:036d}": ("unknown", False, "x" * 160) for i in range(15)}
    assert len(pickle.dumps((None, hopper(0, links=links)))) < MESSAGE_BYTES - 8


class NoGather:
    """A group whose ranks must not be asked."""

    def __getattr__(self, name):
        raise AssertionError(f"{name} was asked for")


@pytest.mark.parametrize("options, protocol", [
    ({}, "shm"), (dict(protocol="auto"), "shm"), (dict(protocol="shm"), "shm"), (dict(device="cpu"), "shm"),
    (dict(protocol="nvlink"), "nvlink")])
def test_without_cuda_nobody_is_asked(options, protocol, monkeypatch):
    monkeypatch.delenv("MOE_TK_PROTOCOL", raising=False)
    monkeypatch.setattr(back_end, "rank_card", NoGather())
    assert decide_back_end(None, options).protocol == protocol


def test_the_variable_counts_before_the_machine_and_the_argument_before_the_variable(monkeypatch):
    monkeypatch.setattr(back_end, "rank_card", NoGather())
    monkeypatch.setenv("MOE_TK_PROTOCOL", "shm")
    with pytest.raises(ArgumentError, match="device is cuda:0, but MOE_TK_PROTOCOL is 'shm'"):
        decide_back_end(None, dict(device="cuda:0"))
    monkeypatch.setenv("MOE_TK_PROTOCOL", "nvlink")
    assert "asked for by MOE_TK_PROTOCOL" in decide_back_end(None, dict(device="cuda:0")).reason
    assert decide_back_end(None, dict(protocol="shm")).protocol == "shm"


class FakeGroup:
    """Two ranks, of which the other one sends `other`."""

    def __init__(self, other: RankCard) -> None:
        self.other = other

    def gather(self, card, *, timeout_s, step):
        return [card, self.other]


def test_a_group_with_nccl_asks_all_ranks_once(monkeypatch):
    monkeypatch.delenv("MOE_TK_PROTOCOL", raising=False)
    monkeypatch.setattr(back_end, "resolve_group", lambda group: group)
    monkeypatch.setattr(back_end, "_has_nccl", lambda group: True)
    monkeypatch.setattr(back_end, "_gpu_card", lambda group, device, why, named: hopper(0, why=why, named=named))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert decide_back_end(FakeGroup(hopper(1)), {}).protocol == "nvlink"
    assert decide_back_end(FakeGroup(hopper(1)), dict(device="cuda:0")).protocol == "nvlink"
    assert decide_back_end(FakeGroup(hopper(1)), dict(dtype=torch.float8_e4m3fn)).protocol == "nvlink"  # which no CPU layer has
    for options, text in ((dict(dtype=torch.float32), "dtype is torch.float32"), (dict(pattern="mega"), "pattern is 'mega'"),
                          (dict(pull=True), "pull is an option of the CPU back end")):
        chosen = decide_back_end(FakeGroup(hopper(1)), options)
        assert chosen.protocol == "shm" and text in chosen.reason
    with pytest.raises(TopologyError, match="device is cpu"):
        decide_back_end(FakeGroup(hopper(1)), dict(device="cpu"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "torch sees no GPU" in decide_back_end(FakeGroup(hopper(1)), {}).reason


def test_what_goes_wrong_while_a_rank_looks_is_told_and_not_raised(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(back_end, "_gpu_card", lambda *_: 1 / 0)
    assert "ZeroDivisionError" in rank_card(SINGLE, "cuda:0", {}).obstacle


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_named_gpu_that_is_not_there_is_an_error_and_the_cpu_may_be_named():
    with pytest.raises(TopologyError, match="torch sees no GPU"):
        moe_tk.MoELayer(**SIZES, device="cuda:0")
    layer = moe_tk.MoELayer(**SIZES, device="cpu")
    assert isinstance(layer, moe_tk.MoELayer) and layer.plan.protocol == "shm"
