"""ag_gemm and gemm_rs in e4m3 as far as they can be checked without a GPU: memory, what a call hands on, errors."""

from __future__ import annotations

import pytest
import torch
from scaled_calls import E4M3, HIDDEN, TOKENS, Dense, fields_of_binding

from moe_tk import ops
from moe_tk.errors import ArgumentError, ArgumentTypeError
from moe_tk.group import SINGLE
from moe_tk.memory.layout import ALIGNMENT
from moe_tk.memory.nvlink_layout import symmetric_items, table_items
from moe_tk.memory.nvlink_ops_layout import ScaledDenseGeometry, scaled_dense_row_items
from moe_tk.ops import cuda_scaled_dense
from moe_tk.planner import FUSED_VARIANTS
from moe_tk.schedule import build_tables


def dense_geometry(**changes) -> ScaledDenseGeometry:
    return ScaledDenseGeometry.of(**{**dict(world=2, rank=0, max_tokens=333, hidden=1024, columns=264, gathers=True), **changes})


@pytest.mark.parametrize("world", [1, 2])
def test_sym_05_dense_workspaces_hold_one_side_only(world):
    """ag_gemm is sent rows with their scales, gemm_rs partial rows; the rest is not there."""
    gathers, scatters = dense_geometry(world=world), dense_geometry(world=world, gathers=False, hidden=264, columns=1024)
    for g, rows, planes, products in ((gathers, world * 333 * 1152, 0, 16), (scatters, 0, world * 333 * 264 * 2, None)):
        named = {item.name: item.bytes for item in (*symmetric_items(g), *scaled_dense_row_items(g))}
        assert (named["rows"], named["planes"]) == (rows, planes)
        assert named["slot_rows"] == (g.max_slots * 264 * 2 if products is None else products)
        for placed in (symmetric_items(g), table_items(g), scaled_dense_row_items(g)):
            for before, after in zip(placed, placed[1:], strict=False):
                assert before.offset + before.bytes <= after.offset and after.offset % ALIGNMENT == 0
    assert {item.name: item.bytes for item in table_items(gathers)}["tasks1"] == gathers.max_blocks * 3 * 16  # of 264 columns
    assert gathers.max_slots >= world * 333 and gathers.num_local_experts == 1
    assert gathers.shared_key() == dense_geometry(world=world, columns=8).shared_key() != scatters.shared_key()


@pytest.mark.parametrize("changes, text", [(dict(hidden=1000), "H is 1000; .*nearest: 896 or 1024"),
                                           (dict(gathers=False, columns=200), "K of this rank is 200; .*nearest: 128 or 256")])
def test_dense_sizes_that_scales_do_not_fit_are_refused(changes, text):
    with pytest.raises(ArgumentError, match=text):
        dense_geometry(**changes)
    dense_geometry(columns=8)
    dense_geometry(gathers=False, hidden=8, columns=256)


@pytest.mark.parametrize("rows", [TOKENS, 256])
@pytest.mark.parametrize("op", ["ag_gemm", "gemm_rs"])
def test_dense_calls_are_routed_ones_of_one_expert(op, rows, sessions):
    """What is handed on: the caller's weight and rows, tables of expert 0 for every row; scales with room for whole row blocks."""
    dense = Dense(op, rows)
    out = dense.call()
    assert out.shape == (rows, 264) and out.dtype == torch.bfloat16
    (session,), ((call, _),) = sessions, sessions[0].calls
    assert set(call) == fields_of_binding() and isinstance(session.geometry, ScaledDenseGeometry)
    assert call["rows"] == call["num_tokens"] == rows and call["topk_ids"] == session.zeros.data_ptr()
    assert FUSED_VARIANTS["float8_e4m3fn"][call["variant"]].row_block == (64 if rows == TOKENS else 128)
    if op == "ag_gemm":
        assert (call["w13"], call["w13_scales"]) == (dense.weight.data_ptr(), dense.weight_scales.data_ptr())
        assert (call["hidden_states"], call["hidden_scales"]) == (dense.x.data_ptr(), dense.x_scales.data_ptr())
        assert (call["activated"], call["row_bytes"]) == (out.data_ptr(), 2 * 264)
        assert 2 * session.geometry.padded_intermediate == 264, "no row behind the weight's last one is described"
        return
    assert (call["w2"], call["w2_scales"]) == (dense.weight.data_ptr(), dense.weight_scales.data_ptr())
    assert (call["activated"], call["out"], call["hidden_states"]) == (dense.x.data_ptr(), out.data_ptr(), 0)
    assert call["scales_stride"] == -(-rows // 128) * 128 and session.geometry.padded_intermediate == HIDDEN
    assert (call["activated_scales"] == dense.x_scales.data_ptr()) == (rows == 256), "whole row blocks: nothing is copied"


@pytest.mark.parametrize("world, tokens", [(1, 1), (2, 70), (3, 64), (8, 333)])
@pytest.mark.parametrize("row_block", [64, 128])
def test_slots_of_one_expert_are_rows_of_the_gathered_tensor(world, tokens, row_block):
    """What the dense operations take for granted, in a workspace with room for more tokens too."""
    stride = 1 << (tokens - 1).bit_length()
    ids = torch.zeros(world * stride, 1, dtype=torch.int64)
    for rank in range(world):
        tables = build_tables(ids, token_counts=[tokens] * world, world=world, rank=rank, num_experts=1, mode="tp",
                              row_block=row_block)
        present = torch.arange(stride).repeat(world) < tokens
        assert torch.equal(tables.slots[present, 0], torch.arange(world * tokens, dtype=torch.int32))
        assert bool((tables.slot_pair[:world * tokens] >= 0).all())


def test_padded_scales_keep_their_places():
    scales = torch.randn(3, 130)
    padded = cuda_scaled_dense.padded_scales(scales)
    assert padded.shape == (3, 256) and padded.is_contiguous() and torch.equal(padded[:, :130], scales)


def test_dense_rows_may_come_in_bfloat16_where_they_travel(sessions):
    assert Dense("ag_gemm", quantised_rows=False).call().shape == (TOKENS, 264)
    assert sessions[0].calls[0][0]["hidden_scales"] == 0
    assert Dense("ag_gemm", rows=0).call().shape == (0, 264) and sessions[1].calls[0][0]["activated"]
    assert Dense("gemm_rs", rows=0).call().shape == (0, 264)


WRONG_DENSE = [  # (op, rows come quantised, changes, class, text)
    ("ag_gemm", True, lambda d: dict(weight_scales=None), ArgumentError,
     r"weight is float8_e4m3fn, so weight_scales \[N/128, H/128, 2\] = \[3, 2, 2\] float32 are wanted"),
    ("ag_gemm", True, lambda d: dict(x_scales=None), ArgumentError, r"x is float8_e4m3fn, so x_scales \[T, H/128\] = \[9, 2\]"),
    ("ag_gemm", False, lambda d: dict(x_scales=torch.ones(9, 2)), ArgumentError, "x_scales are given, but x is bfloat16"),
    ("ag_gemm", True, lambda d: dict(x_scales=d.x_scales.t()), ArgumentError, "x_scales has shape"),
    ("ag_gemm", True, lambda d: dict(weight_scales=d.weight_scales[..., 0]), ArgumentError, "weight_scales has shape"),
    ("ag_gemm", True, lambda d: dict(x=d.x[:, :64]), ArgumentError, r"x.size\(1\) is 64, wanted a multiple of 128"),
    ("ag_gemm", True, lambda d: dict(weight=d.weight[:, :128]), ArgumentError, "weight has shape"),
    ("ag_gemm", True, lambda d: dict(weight=d.weight[:60], weight_scales=d.weight_scales[:1]), ArgumentError,
     r"weight.size\(0\) is 60, wanted a multiple of 8"),
    ("ag_gemm", False, lambda d: dict(weight=d.weight.float().bfloat16()), ArgumentError,
     "weight_scales are given, but weight is bfloat16"),
    ("ag_gemm", True, lambda d: dict(weight=d.weight.float().bfloat16()), ArgumentTypeError,
     "x has dtype float8_e4m3fn, wanted bfloat16"),
    ("gemm_rs", False, lambda d: {}, ArgumentTypeError, "x has dtype bfloat16, wanted float8_e4m3fn"),
    ("gemm_rs", True, lambda d: dict(x_scales=None), ArgumentError, r"x is float8_e4m3fn, so x_scales \[K/128, M\] = \[2, 9\]"),
    ("gemm_rs", True, lambda d: dict(x_scales=d.x_scales.t()), ArgumentError, "x_scales has shape"),
    ("gemm_rs", True, lambda d: dict(weight_scales=None), ArgumentError, r"weight_scales \[N/128, K/128, 2\]"),
]


@pytest.mark.parametrize("op, rows, changes, error, text", WRONG_DENSE)
def test_krn_16_wrong_dense_arguments_get_one_sentence(op, rows, changes, error, text, sessions):
    dense = Dense(op, quantised_rows=rows)
    with pytest.raises(error, match=text):
        dense.call(**changes(dense))
    assert not sessions


@pytest.mark.parametrize("op", ["ag_gemm", "gemm_rs"])
def test_dense_e4m3_on_the_cpu_is_one_clear_error(op):
    dense = Dense(op)
    for given in (dict(x=dense.x, weight=dense.weight, x_scales=dense.x_scales, weight_scales=dense.weight_scales),
                  dict(x=torch.ones(4, 8), weight=torch.ones(8, 8), weight_scales=dense.weight_scales),
                  dict(x=torch.ones(4, 8).bfloat16(), weight=torch.zeros(8, 8, dtype=torch.uint8).view(E4M3))):
        with pytest.raises(ArgumentError, match="the CPU back end computes in bfloat16 and float32: e4m3 wants tensors on GPUs"):
            getattr(ops, op)(**given, group=SINGLE)
    ops.release_ops_memory()
