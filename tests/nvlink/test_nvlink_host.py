"""The CUDA back end as far as it can be checked without a GPU: sizes, weight layout, choices, mailbox, errors, the module."""

from __future__ import annotations

import contextlib
import gc
import math
import threading
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import moe_tk
from moe_tk import reference
from moe_tk.back_end import decide_back_end
from moe_tk.builder.arch import parse_arch
from moe_tk.builder.cuda_toolkit import choose_toolkit, find_toolkits, torch_cuda_version
from moe_tk.cuda_layer import CudaMoELayer
from moe_tk.errors import (
    ArgumentError,
    ArgumentTypeError,
    BuildError,
    CapacityError,
    MoETkError,
    PeerRefused,
    TopologyError,
)
from moe_tk.group import SINGLE
from moe_tk.memory.layout import ALIGNMENT, CONTROL_BYTES
from moe_tk.memory.nvlink_layout import (
    MAX_GROUPS,
    ROW_BLOCKS,
    NvlinkGeometry,
    nvlink_estimate,
    row_items,
    symmetric_items,
    table_items,
)
from moe_tk.planner import FUSED_VARIANTS
from moe_tk.runtime import nvlink_session
from moe_tk.runtime.gemm_tiles import POLICY_EVICT_FIRST, POLICY_NORMAL
from moe_tk.runtime.launch import SWIGLU, Activation
from moe_tk.runtime.nvlink_layer import NvlinkLayer, engine_weights, one_limit, tiled
from moe_tk.runtime.nvlink_session import CAPACITY, DISAGREE, RECORD, RECORDS_OFFSET, REFUSED, NvlinkSession, note_lost, usable_sms

SIZES = dict(num_experts=64, top_k=8, hidden_size=4096, intermediate_size=3072, max_tokens_per_rank=8192)


def geometry(**changes) -> NvlinkGeometry:
    return NvlinkGeometry(**{**dict(world=2, rank=0, max_tokens=512, top_k=4, num_experts=30, hidden=1024, intermediate_size=200,
                                    mode="ep", max_segments=2), **changes})


@pytest.mark.parametrize("items", [symmetric_items, table_items, row_items])
@pytest.mark.parametrize("mode", ["ep", "tp"])
@pytest.mark.parametrize("world", [1, 2, 8])
def test_sym_05_items_are_aligned_and_do_not_overlap(items, mode, world):
    placed = items(geometry(mode=mode, world=world, rank=world - 1))
    for before, after in zip(placed, placed[1:], strict=False):
        assert before.offset + before.bytes <= after.offset and after.offset % ALIGNMENT == 0
    assert len({item.name for item in placed}) == len(placed)


def test_sym_05_estimate_is_the_sum_of_the_buffers_and_bounded_by_the_routing():
    g = geometry(max_tokens=8192, top_k=8, num_experts=64, hidden=4096, intermediate_size=3072, max_segments=1)
    pairs = 2 * 8192 * 8
    assert pairs <= g.max_slots <= pairs + 32 * 128
    named = {item.name: item for item in row_items(g)}
    assert named["slot_rows"].bytes == g.max_slots * 4096 * 2
    estimate = nvlink_estimate(g)
    assert estimate.total == estimate.symmetric_bytes + estimate.local_bytes
    # Symmetric memory holds this rank's tokens once and one plane per rank, not world x T x k rows.
    assert estimate.symmetric_bytes < 1.1 * (1 + g.world) * 8192 * 4096 * 2


def test_one_process_alone_exports_no_rows():
    assert {item.name: item.bytes for item in symmetric_items(geometry(world=1))}["rows"] == 0


@pytest.mark.parametrize("changes, text", [
    (dict(top_k=33), "top_k is 33, wanted 1..32"),
    (dict(world=33), "world is 33"),
    (dict(mode="tp", num_experts=1000, max_segments=2), f"2000 groups, wanted at most {MAX_GROUPS}"),
    (dict(max_tokens=10**7, hidden=7168), "more than the kernels can index"),
    (dict(max_tokens=2**20 + 1, top_k=1, hidden=64), "2 ranks would have 2097154 tokens, wanted at most 2097152")])
def test_krn_16_limits_are_stated_with_their_values(changes, text):
    with pytest.raises(ArgumentError, match=text):
        geometry(**changes)


@pytest.mark.parametrize("row_block", ROW_BLOCKS)
def test_slots_hold_every_routing_for_either_row_block(row_block):
    g = geometry(max_tokens=33, top_k=3, num_experts=7, max_segments=4)
    worst = 2 * 33 * 3
    groups = 4 * g.num_local_experts
    full = math.ceil((worst - groups + 1) / row_block) + groups - 1  # one row in every group but one
    assert full <= g.max_blocks and full * row_block <= g.max_slots


@pytest.mark.parametrize("experts, inter", [(3, 16), (2, 20), (1, 7), (0, 8)])
def test_krn_22_engine_weights_give_the_same_layer(experts, inter):
    """The kernels' layout, read as the epilogue reads it, gives the activation and output of the plain weights."""
    generator = torch.Generator().manual_seed(experts)
    w13 = torch.randn(experts, 2 * inter, 32, generator=generator, dtype=torch.float64)
    w2 = torch.randn(experts, 32, inter, generator=generator, dtype=torch.float64)
    x = torch.randn(5, 32, generator=generator, dtype=torch.float64)
    first, second = engine_weights(w13, w2)
    padded = math.ceil(inter / 8) * 8
    assert first.shape == (max(1, experts), 1, 1, 256, 64) and second.shape == (max(1, experts), 1, 1, 256, 64)
    assert first[:, 0, 0, 2 * padded:].abs().sum() == 0 and first[..., 32:].abs().sum() == 0
    first, second = first[:, 0, 0, :2 * padded, :32], second[:, 0, 0, :32, :padded]
    for e in range(experts):
        both = x @ first[e].T
        columns = both.view(5, padded // 8, 2, 8)  # accumulator columns [16 b, 16 b + 8) gate, then up
        act = reference.activate(columns[:, :, 0].reshape(5, padded), columns[:, :, 1].reshape(5, padded))
        want = reference.activate(x @ w13[e, :inter].T, x @ w13[e, inter:].T) @ w2[e].T
        torch.testing.assert_close(act @ second[e].T, want)


def test_tiles_lie_in_the_order_of_their_loads():
    weights = torch.randn(2, 600, 200)
    tiles = tiled(weights)
    assert tiles.shape == (2, 3, 4, 256, 64) and tiles.is_contiguous()
    padded = torch.nn.functional.pad(weights, (0, 56, 0, 168))
    for block in range(3):
        for panel in range(4):
            rows, cols = slice(256 * block, 256 * block + 256), slice(64 * panel, 64 * panel + 64)
            assert torch.equal(tiles[:, block, panel], padded[:, rows, cols])


def test_limits_of_both_halves_must_be_equal():
    assert one_limit(SWIGLU) == math.inf and one_limit(Activation(gate_limit=7.0, up_limit=7.0)) == 7.0
    with pytest.raises(ArgumentError, match="gate_limit 7.0 and up_limit None"):
        one_limit(Activation(gate_limit=7.0))


@pytest.mark.parametrize("tokens, row_block", [(0, 64), (64, 64), (95, 64), (96, 128), (8192, 128)])
def test_row_block_follows_the_rows_per_expert(tokens, row_block):
    layer = NvlinkLayer.__new__(NvlinkLayer)
    layer.geometry = geometry(max_tokens=8192, top_k=8, num_experts=32)
    layer.row_block = layer.segments = layer.variant = None
    layer.session = SimpleNamespace(num_sms=132)
    assert layer.variant_of(tokens).row_block == row_block and layer.choices(tokens)[1] == 1
    layer.row_block, layer.segments = 64, 3
    assert layer.variant_of(tokens).row_block == 64 and layer.choices(tokens)[1] == 3
    layer.variant = "64x128"  # forced
    assert layer.variant_of(tokens) == FUSED_VARIANTS["bfloat16"][layer.choices(tokens)[0]]
    assert layer.variant_of(tokens).name == "64x128"


@pytest.mark.parametrize("tokens, once", [(0, True), (64, True), (65, False), (95, False), (96, True), (128, True), (129, False)])
def test_weights_that_are_read_once_leave_l2_first(tokens, once):
    """Where an expert has one row block on average: of 64 rows, or from 48 rows an expert on of 128."""
    layer = NvlinkLayer.__new__(NvlinkLayer)
    layer.geometry = geometry(max_tokens=8192, top_k=8, num_experts=32)
    layer.row_block = layer.segments = layer.variant = layer.weights_policy = None
    assert layer._policy(tokens) == (POLICY_EVICT_FIRST if once else POLICY_NORMAL)


def session(rank: int = 1) -> NvlinkSession:
    """A session without memory: what looks at the mailbox only."""
    bare = NvlinkSession.__new__(NvlinkSession)
    bare._mail, bare.poisoned, bare._lock = np.zeros(8, dtype=np.int32), None, threading.Lock()
    bare.group, bare.geometry = SimpleNamespace(rank=rank, world=2), geometry()
    return bare


TOO_MANY = "rank 0 had 600 tokens, more than max_tokens_per_rank=512"


@pytest.mark.parametrize("reason, tokens, error, text", [
    (REFUSED, 0, PeerRefused, "rank 0 refused"), (CAPACITY, 600, CapacityError, TOO_MANY), (REFUSED, 600, CapacityError, TOO_MANY),
    (DISAGREE, 600, MoETkError, "rank 0 made another one")])
def test_void_calls_raise_once_and_leave_the_session_usable(reason, tokens, error, text):
    s = session()
    s._mail[1:4] = reason, 0, tokens
    with pytest.raises(error, match=text):
        s.check("moe_layer", 1.0)
    s.check("moe_layer", 1.0)
    assert s.poisoned is None


def test_the_rank_that_refused_has_raised_already():
    s = session(rank=0)
    s._mail[1:4] = REFUSED, 0, 0
    s.check("moe_layer", 1.0)


def test_sym_08_a_session_goes_when_no_layer_holds_it(monkeypatch):
    """Its watch runs on in a thread until it is closed, and must not keep the session and its memory alive."""
    workspace = SimpleNamespace(mailbox=torch.zeros(8, dtype=torch.int32), fields=lambda num_sms: {})
    monkeypatch.setattr(NvlinkSession, "WORKSPACE", staticmethod(lambda *arguments, **named: workspace))
    monkeypatch.setattr(nvlink_session, "nvlink_module", lambda traced: SimpleNamespace(Workspace=lambda fields: object()))
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132))
    made = NvlinkSession(SINGLE, geometry(world=1), device=torch.device("cuda", 0), generation=1, reserve_sms=0, timeout_s=5.0)
    there, watch = weakref.ref(made), made.watch
    try:
        assert made.num_sms == 132
        del made
        gc.collect()
        assert there() is None
    finally:
        watch.close()


@pytest.mark.parametrize("rank", [0, 1, 30, 31])
def test_lost_ranks_are_bits_of_the_mailbox(rank):
    s = session()
    note_lost(s._mail, rank)
    assert s._mail[4:6].view(np.uint64)[0] == 1 << rank


def test_records_fit_the_control_block():
    assert RECORD.size == 64 and RECORDS_OFFSET + 64 * RECORD.size == CONTROL_BYTES


def test_krn_03_reserve_leaves_room_for_the_launches():
    assert usable_sms(132, 8) == 124
    with pytest.raises(ArgumentError, match="wanted at most 116"):
        usable_sms(132, 120)


@pytest.mark.parametrize("options, error, text", [
    (dict(pattern="mega"), ArgumentError, "pattern is 'mega', wanted one of auto, two_kernel, serial on the CUDA back end"),
    (dict(dtype=torch.float32), ArgumentTypeError, "dtype is torch.float32"), (dict(mode="pp"), ArgumentError, "mode is 'pp'"),
    (dict(weight_position="after"), ArgumentError, "weight_position is 'after'"),
    (dict(row_block=96), ArgumentError, "row_block is 96"),
    (dict(hidden_size=4100), ArgumentError, "multiple of 8"), (dict(timeout_s=0), ArgumentError, "timeout_s")])
def test_arguments_are_checked_before_a_gpu_is_needed(options, error, text):
    with pytest.raises(error, match=text):
        moe_tk.MoELayer(**{**SIZES, "protocol": "nvlink", **options})


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_the_error_says_what_to_use():
    with pytest.raises(TopologyError, match="torch sees none: use protocol='shm'"):
        moe_tk.MoELayer(**SIZES, protocol="nvlink")


def bare_layer(device: str) -> CudaMoELayer:
    """A layer without a session: what looks at arguments only. The device may be the CPU here."""
    layer = CudaMoELayer.__new__(CudaMoELayer)
    layer._calls, layer.device, layer.dtype = SimpleNamespace(w13=object()), torch.device(device), torch.bfloat16
    layer.hidden_size, layer.top_k, layer.max_tokens_per_rank = 64, 2, 16
    layer.group = SimpleNamespace(rank=1, world=2)
    return layer


def arguments(tokens: int = 8) -> list[torch.Tensor]:
    return [torch.zeros(tokens, 64, dtype=torch.bfloat16), torch.zeros(tokens, 2, dtype=torch.int64), torch.ones(tokens, 2)]


@pytest.mark.parametrize("device, change, error, text", [
    ("cuda:1", lambda x, ids, w: (x, ids, w), ArgumentError, "hidden_states is on cpu, but this layer runs on cuda:1"),
    ("cpu", lambda x, ids, w: (x.float(), ids, w), ArgumentTypeError, "hidden_states has dtype float32"),
    ("cpu", lambda x, ids, w: (x, w, ids), ArgumentTypeError, "are they swapped"),
    ("cpu", lambda x, ids, w: (x, ids[:, :1], w), ArgumentError, "topk_ids has shape"),
    ("cpu", lambda x, ids, w: (x, ids, w, x[:, ::2].repeat(1, 2)[1:]), ArgumentError, "out has shape"),
    ("cpu", lambda x, ids, w: (x, ids, w, x.T.contiguous().T), ArgumentError, "out has strides"),
    ("cpu", lambda x, ids, w: (*arguments(17), None), CapacityError, "rank 1 had 17 tokens, more than max_tokens_per_rank=16"),
    ("cpu", lambda x, ids, w: (x.requires_grad_(), ids, w), ArgumentError, "forward pass only")])
def test_arguments_of_a_call_are_checked(device, change, error, text):
    changed = list(change(*arguments()))
    with pytest.raises(error, match=text):
        bare_layer(device)._check_arguments(*changed, *[None] * (4 - len(changed)))


def test_rows_that_bulk_copies_cannot_read_are_copied():
    x, ids, weights = arguments()
    odd = torch.zeros(8 * 64 + 1, dtype=torch.bfloat16)[1:].view(8, 64)
    for given in (odd, x.T.contiguous().T):
        hidden, _, _, out = bare_layer("cpu")._check_arguments(given, ids, weights, None)
        assert hidden.data_ptr() % 16 == 0 and hidden.is_contiguous() and torch.equal(hidden, given) and out.shape == x.shape
    assert bare_layer("cpu")._check_arguments(x, ids, weights, None)[0] is x


def test_protocol_chooses_the_back_end(monkeypatch):
    assert decide_back_end(None, dict(protocol="nvlink")).protocol == "nvlink"
    assert decide_back_end(None, dict(protocol="auto")).protocol == "shm"
    monkeypatch.setenv("MOE_TK_PROTOCOL", "nvlink")
    assert decide_back_end(None, {}).protocol == "nvlink"
    assert decide_back_end(None, dict(protocol="shm")).protocol == "shm"


def test_module_compiles_and_its_sizes_are_the_layouts():
    """Every instantiation compiles for SM90 here, and nvlink_module() compares the constants of both sides."""
    if choose_toolkit(parse_arch("90a"), find_toolkits(), torch_cuda_version()).chosen is None:
        pytest.skip("no nvcc that can build for SM90")
    from moe_tk.runtime.nvlink import compiled_variants, nvlink_module

    try:
        module = nvlink_module()
    except BuildError as error:
        pytest.fail(str(error))
    for quantised, dtype in enumerate(("bfloat16", "float8_e4m3fn")):
        assert compiled_variants(module, bool(quantised)) == FUSED_VARIANTS[dtype]
    variants = [*module.variants(), *module.variants(True)]
    assert all(variant[name] <= 227 * 1024 for variant in variants for name in ("gather_shared", "scatter_shared"))
