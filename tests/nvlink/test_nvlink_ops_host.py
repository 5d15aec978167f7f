"""moe_tk.ops over NVLink as far as it can be checked without a GPU: sizes, sessions, shapes, the order of checkpoint weights."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from moe_tk import ops
from moe_tk.errors import ArgumentError, CapacityError, MoETkError, PeerRefused
from moe_tk.group import SINGLE, RankGroup
from moe_tk.memory.layout import ALIGNMENT
from moe_tk.memory.nvlink_layout import symmetric_items, table_items
from moe_tk.memory.nvlink_ops_layout import (
    DenseGeometry,
    RoutedOpsGeometry,
    dense_symmetric_items,
    dense_table_items,
    routed_row_items,
)
from moe_tk.ops import cuda_checks, cuda_functional, cuda_sessions, functional
from moe_tk.runtime.nvlink_layer import INTERLEAVE

DEVICE = torch.device("cuda", 0)


def dense(**changes) -> DenseGeometry:
    return DenseGeometry(**{**dict(world=2, rank=0, max_tokens=333, width=1024, columns=264, gathers=True), **changes})


def routed(**changes) -> RoutedOpsGeometry:
    return RoutedOpsGeometry(**{**dict(world=2, rank=0, max_tokens=333, top_k=4, num_experts=30, hidden=1024, intermediate_size=0,
                                       mode="ep", max_segments=1, width=200), **changes})


@pytest.mark.parametrize("world", [1, 2, 8])
def test_sym_05_items_are_aligned_and_do_not_overlap(world):
    geometry, other = dense(world=world), routed(world=world)
    for placed in (dense_symmetric_items(geometry), dense_table_items(geometry), routed_row_items(other), symmetric_items(other),
                   table_items(other)):
        for before, after in zip(placed, placed[1:], strict=False):
            assert before.offset + before.bytes <= after.offset and after.offset % ALIGNMENT == 0


def test_only_what_is_sent_is_symmetric():
    """ag_gemm keeps one plane of rows per rank (none if alone), and neither op a copy of its own rows or of its result."""
    planes = {item.name: item.bytes for item in dense_symmetric_items(dense())}["planes"]
    assert planes == 2 * 333 * 1024 * 2
    assert {item.name: item.bytes for item in dense_symmetric_items(dense(world=1))}["planes"] == 0
    assert {item.name: item.bytes for item in dense_symmetric_items(dense(world=1, gathers=False))}["planes"] == 333 * 1024 * 2
    assert {item.name: item.bytes for item in routed_row_items(routed())}["activated"] == 0


def test_sizes_of_this_rank_alone_are_not_agreed_on():
    """Ranks may hold different numbers of columns or of I; what they share must be equal."""
    assert dense(columns=8).shared_key() == dense(rank=1).shared_key() != dense(width=8).shared_key()
    assert dense().shared_key() != dense(gathers=False).shared_key()
    assert routed(width=8).shared_key() == routed(rank=1).shared_key() != routed(top_k=2).shared_key()
    assert routed(mode="tp", width=48).local_intermediate == 48


@pytest.mark.parametrize("changes, text", [(dict(world=33), "world is 33"),
                                           (dict(max_tokens=10**7, width=8192), "more than the kernels")])
def test_krn_16_limits_are_stated_with_their_values(changes, text):
    with pytest.raises(ArgumentError, match=text):
        dense(**changes)


def test_krn_22_checkpoint_weights_are_read_in_the_kernels_order():
    """The descriptor of checkpoint_map, as strides: box b of expert e is gate rows [8 b, 8 b + 8), then the up rows."""
    experts, inter, hidden = 3, 40, 16
    w13 = torch.arange(experts * 2 * inter * hidden).view(experts, 2 * inter, hidden)
    groups = (2 * experts - 1) * inter // INTERLEAVE
    boxes = torch.as_strided(w13, (groups, 2, INTERLEAVE, hidden), (INTERLEAVE * hidden, inter * hidden, hidden, 1))
    for expert in range(experts):
        for box in range(inter // INTERLEAVE):
            rows = slice(box * INTERLEAVE, (box + 1) * INTERLEAVE)
            got = boxes[expert * (2 * inter // INTERLEAVE) + box]
            assert torch.equal(got[0], w13[expert, :inter][rows]) and torch.equal(got[1], w13[expert, inter:][rows])


class FakeSession:
    """What GroupOps sees of a session."""

    def __init__(self, geometry) -> None:
        self.geometry, self.poisoned, self.failure, self.refused = geometry, None, None, []

    def check(self, op, timeout_s) -> None:
        if self.failure:
            raise self.failure

    def refuse(self, *, timeout_s, stream) -> None:
        self.refused.append("told")

    def forget_verdict(self) -> None:
        self.refused.append("verdict forgotten")


@pytest.fixture
def group_ops(monkeypatch):
    """GroupOps that makes fake sessions, on a machine that may have no GPU."""
    made = []

    def make(group, geometry, *, device, timeout_s):
        made.append(geometry.max_tokens)
        return FakeSession(geometry)

    monkeypatch.setattr(cuda_sessions, "make_session", make)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    held = cuda_sessions.GroupOps(SINGLE, DEVICE)
    held.made = made
    return held


def test_krn_13_one_workspace_serves_fewer_rows(group_ops):
    """Workspaces are made for the next power of two and used for all that fits, whatever comes in between."""
    sessions = [group_ops.session("ag_gemm", dense(max_tokens=tokens), timeout_s=1.0) for tokens in (100, 128, 1, 129, 7, 256)]
    assert group_ops.made == [128, 256] and sessions[0] is sessions[2] and sessions[4] is sessions[5]
    assert group_ops.session("ag_gemm", dense(width=8, max_tokens=1), timeout_s=1.0).geometry.max_tokens == 1
    assert group_ops.session("gemm_rs", dense(gathers=False, max_tokens=5), timeout_s=1.0).geometry.max_tokens == 8
    assert len(group_ops.sessions()) == 4


def test_grf_no_workspace_is_made_in_a_capture(group_ops, monkeypatch):
    group_ops.session("ag_gemm", dense(max_tokens=100), timeout_s=1.0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    group_ops.session("ag_gemm", dense(max_tokens=3), timeout_s=1.0)
    with pytest.raises(MoETkError, match="no earlier call made room for 200 tokens"):
        group_ops.session("ag_gemm", dense(max_tokens=200), timeout_s=1.0)


@pytest.mark.parametrize("failure", [PeerRefused("rank 0 refused"), CapacityError("too many")])
def test_the_next_op_raises_what_an_earlier_one_failed_with(group_ops, failure):
    group_ops.session("ag_gemm", dense(), timeout_s=1.0)
    session = group_ops.session("gemm_rs", dense(gathers=False), timeout_s=1.0)
    session.failure = failure
    with pytest.raises(type(failure)):
        group_ops.check("ag_gemm", 1.0)
    session.failure, session.poisoned = None, "rank 1 died."
    with pytest.raises(MoETkError, match=r"ag_gemm: .*rank 1 died\. To start anew, call moe_tk.ops.release_ops_memory"):
        group_ops.check("ag_gemm", 1.0)


def test_a_refusal_before_the_first_call_is_told_where_the_others_wait(group_ops):
    told = []

    class Listening(RankGroup):
        def _exchange(self, envelope, *, timeout_s, step):
            told.append(envelope)
            return [envelope]

    group_ops.group = Listening(world=2, rank=0, name="pair")
    group_ops.refuse("ag_gemm", ArgumentError("x is wrong"), timeout_s=1.0)
    assert told[0][0][0] is PeerRefused and "x is wrong" in told[0][0][2]


def test_a_rank_that_refuses_is_not_told_later_that_another_one_refused_too(group_ops, monkeypatch):
    """Where all ranks refuse a call, the first of them is named to all; if the others raised that in their next op, they would
    leave the first one alone in it."""
    session = group_ops.session("ag_gemm", dense(), timeout_s=1.0)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(group_ops, "stream", lambda: None)
    group_ops.refuse("ag_gemm", ArgumentError("x is wrong"), timeout_s=1.0)
    assert session.refused == ["told", "verdict forgotten"]


def test_release_drops_everything():
    cuda_sessions._held[("name", 0, DEVICE)] = cuda_sessions.GroupOps(SINGLE, DEVICE)
    ops.release_ops_memory()
    assert not cuda_sessions._held
    ops.synchronize()  # nothing to wait for


@pytest.mark.parametrize("tokens, row_block", [(0, 64), (95, 64), (96, 128), (8192, 128)])
def test_row_blocks_of_the_routed_ops_follow_from_sizes_that_all_ranks_know(tokens, row_block):
    sizes = dict(world=2, tokens_per_rank=tokens, top_k=8, num_experts=32)
    assert functional.routed_row_block(True, **sizes) == row_block
    assert functional.routed_row_block(False, **sizes) == functional.ROW_BLOCK


@pytest.mark.parametrize("tokens, rows", [(9, 64 * (1 + 6)), (512, 128 * (8 + 6))])
def test_ops_01_fake_outputs_on_cuda_have_the_kernels_shapes(tokens, rows):
    with FakeTensorMode():
        x = torch.empty(tokens, 16, dtype=torch.bfloat16, device="cuda")
        ids = torch.empty(tokens, 2, dtype=torch.int64, device="cuda")
        w13 = torch.empty(6, 32, 16, dtype=torch.bfloat16, device="cuda")
        activated, offsets, slots = torch.ops.moe_tk.dispatch_gemm(x, ids, None, w13, 6, "ep", None, "swiglu", None, "single", None)
        assert activated.shape == (rows, 16) and activated.is_cuda and activated.dtype == torch.bfloat16
        assert offsets.shape == (7,) and slots.shape == (tokens, 2) and slots.dtype == torch.int32 and slots.is_cuda
        assert torch.ops.moe_tk.gemm_rs(x, x, "single").shape == (tokens, tokens)


@pytest.mark.parametrize("tokens, stride, text", [(5, 4, "5 tokens, more than tokens_per_rank=4"),
                                                  (5, -1, "tokens_per_rank is -1")])
def test_strides_that_cannot_hold_the_tokens_are_refused(tokens, stride, text):
    with pytest.raises(ArgumentError, match=text):
        cuda_checks.check_stride(tokens, stride)
    assert cuda_checks.check_stride(3, 4) == 4 and cuda_checks.check_stride(3, None) == 3


def test_widths_that_tma_cannot_address_are_refused():
    with pytest.raises(ArgumentError, match="multiple of 16 on CUDA: pad I"):
        cuda_checks.check_first(torch.empty(2, 24, 16, dtype=torch.bfloat16), None, hidden=16, local=2, device=torch.device("cpu"))
    with pytest.raises(ArgumentError, match=r"w2.size\(2\) is 12"):
        cuda_checks.check_second(torch.empty(2, 16, 12, dtype=torch.bfloat16), None, quantised=False, hidden=16, inter=12, local=2,
                                 device=torch.device("cpu"))


def test_signatures_tell_calls_apart():
    """What must be equal on all ranks is in the signature, and nothing else."""

    def of(op="dispatch_gemm", equal=(), inter=64, **changes):
        sizes = {**dict(hidden=64, ids=torch.zeros(5, 2), num_experts=8, mode="ep", stride=5), **changes}
        return cuda_functional._Routed(op, SINGLE, inter=inter, equal=equal, **sizes).signature

    base = of()
    assert base == of() == of(inter=128)
    assert len({base, of("mega_moe"), of(equal=(True,)), of(hidden=72), of(num_experts=9), of(mode="tp"), of(stride=6),
                of(ids=torch.zeros(5, 3)), of(quantised=True, hidden=128, inter=128)}) == 9


def test_cpu_tensors_never_reach_the_cuda_side():
    x = torch.randn(4, 16)
    assert functional._cuda_ops(x) is None and functional._cuda_ops("x") is None
    assert ops.ag_gemm(x, x, group=SINGLE).shape == (4, 4)
