"""The routed ops in e4m3 as far as they can be checked without a GPU: memory, weights, what a call hands on, errors."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from scaled_calls import E4M3, EXPERTS, HIDDEN, INTER, ROWS, TOKENS, Arguments, bits, checkpoint, fields_of_binding

from moe_tk import ops, reference
from moe_tk.errors import ArgumentError, ArgumentTypeError
from moe_tk.group import SINGLE
from moe_tk.memory.nvlink_layout import NvlinkGeometry, symmetric_items, table_items
from moe_tk.memory.nvlink_ops_layout import RoutedOpsGeometry, routed_row_items
from moe_tk.ops import cuda_checks
from moe_tk.planner import FUSED_VARIANTS
from moe_tk.runtime.nvlink_ops import RoutedOpsWorkspace
from moe_tk.weights import gemm as gemm_weights


def geometry(**changes) -> RoutedOpsGeometry:
    return RoutedOpsGeometry(**{**dict(world=2, rank=0, max_tokens=333, top_k=4, num_experts=30, hidden=1024, intermediate_size=0,
                                       mode="ep", max_segments=1, width=256, dtype="float8_e4m3fn"), **changes})


@pytest.mark.parametrize("world", [1, 2])
def test_sym_05_the_workspace_is_the_layers_without_what_the_caller_holds(world):
    """Rows travel with their scales, own ones too; the activation and its scales are tensors of the call."""
    g = geometry(world=world)
    sizes = dict(world=world, rank=0, max_tokens=333, top_k=4, num_experts=30, hidden=1024, mode="ep", max_segments=1)
    of_layer = NvlinkGeometry(intermediate_size=256, dtype="float8_e4m3fn", **sizes)
    assert symmetric_items(g) == symmetric_items(of_layer) and table_items(g) == table_items(of_layer)
    assert {item.name: item.bytes for item in symmetric_items(g)}["rows"] == world * 333 * (1024 + 128)
    assert {item.name: item.bytes for item in routed_row_items(g)} == {"slot_rows": g.max_slots * 1024 * 2, "activated": 0}
    assert RoutedOpsWorkspace.items_of(g)[2] == routed_row_items(g)


def test_poison_knows_which_items_there_are(monkeypatch):
    filled = []
    workspace = RoutedOpsWorkspace.__new__(RoutedOpsWorkspace)
    workspace.geometry = geometry()
    monkeypatch.setattr(workspace, "local_bytes", lambda name: filled.append(name) or torch.zeros(1, dtype=torch.uint8))
    monkeypatch.setattr(workspace, "region", lambda name, dtype: filled.append(name) or torch.zeros(1, dtype=torch.uint8))
    workspace.poison()
    assert filled == ["slot_rows", "activated", "rows", "planes"]


def test_ranks_agree_on_the_dtype_but_not_on_their_widths():
    assert geometry(width=128).shared_key() == geometry(rank=1).shared_key() != geometry(dtype="bfloat16").shared_key()


@pytest.mark.parametrize("changes, text", [(dict(width=200), "I of this rank is 200; .*nearest: 128 or 256"),
                                           (dict(hidden=1000), "hidden_size is 1000; .*nearest: 896 or 1024")])
def test_sizes_that_scales_do_not_fit_are_refused(changes, text):
    with pytest.raises(ArgumentError, match=text):
        geometry(**changes)
    geometry(dtype="bfloat16", **changes)


def test_weights_of_a_checkpoint_come_in_the_order_of_the_grouped_gemm():
    """scaled_weights makes both GEMMs' operands: checked with the host engine against float64."""
    w13, w2 = checkpoint(experts=3)
    (q13, s13), (q2, s2) = ops.quantise_weights(w13), ops.quantise_weights(w2)
    kept, given = ops.scaled_weights(w13, w2), ops.scaled_weights(q13, q2, w13_scale=s13, w2_scale=s2)
    for name in ("w13", "w2", "w13_scales", "w2_scales"):
        assert torch.equal(bits(getattr(kept, name)), bits(getattr(given, name))), name
    assert given.w2 is q2 or given.w2.data_ptr() == q2.data_ptr()
    x = torch.randn(192, HIDDEN, generator=torch.Generator().manual_seed(4))
    rows, scales = ops.quantise_rows(x)
    offsets = torch.tensor([0, 64, 128, 192], dtype=torch.int32)
    act, act_scales = ops.grouped_gemm(rows, kept.w13, offsets, row_block=64, activation="swiglu", x_scale=scales,
                                       w_scale=kept.w13_scales)
    out = ops.grouped_gemm(act, kept.w2, offsets, row_block=64, x_scale=act_scales, w_scale=kept.w2_scales)
    ids = torch.arange(3).repeat_interleave(64)[:, None]
    want = reference.moe_layer(gemm_weights.dequantise_rows(rows, scales), ids, torch.ones(192, 1),
                               gemm_weights.dequantise_weights(q13, s13), gemm_weights.dequantise_weights(q2, s2))
    assert reference.relative_error(out, want) <= reference.ERROR_BUDGET[E4M3]


def test_a_rank_without_experts_has_weights_too():
    w13, w2 = checkpoint(experts=0)
    kept = ops.scaled_weights(w13, w2)
    assert kept.w13.shape == (0, 2 * INTER, HIDDEN) and kept.w2_scales.shape == (0, HIDDEN // 128, INTER // 128, 2)


@pytest.mark.parametrize("change, error, text", [
    (lambda a, b, s, t: (a[:, :300], b[..., :150], None, None), ArgumentTypeError, "w13 has dtype float32"),
    (lambda a, b, s, t: (a.bfloat16()[:, :320], b.bfloat16()[..., :160].contiguous(), None, None), ArgumentError,
     r"w13.size\(1\) is 320, wanted a multiple of 256 .*256 and 512"),
    (lambda a, b, s, t: (a.bfloat16()[..., :200], b.bfloat16()[:, :200], None, None), ArgumentError, r"w13.size\(2\) is 200"),
    (lambda a, b, s, t: (a.bfloat16(), ops.quantise_weights(b)[0], None, t), ArgumentTypeError, "wanted one dtype for both"),
    (lambda a, b, s, t: (a.bfloat16(), b.bfloat16(), s, None), ArgumentError, "w13_scale is given, but w13 is"),
    (lambda a, b, s, t: (ops.quantise_weights(a)[0], ops.quantise_weights(b)[0], s, None), ArgumentError, "w2_scale is wanted"),
    (lambda a, b, s, t: (ops.quantise_weights(a)[0], ops.quantise_weights(b)[0], s[:, :1], t), ArgumentError,
     "w13_scale has shape"),
    (lambda a, b, s, t: (a.bfloat16(), b.bfloat16()[:2], None, None), ArgumentError, "w2 has shape"),
    (lambda a, b, s, t: (a.tolist(), b, None, None), ArgumentTypeError, "w13 must be a tensor")])
def test_checkpoints_that_cannot_be_are_refused(change, error, text):
    w13, w2 = torch.randn(3, 512, 256), torch.randn(3, 256, 256)
    first, second, first_scale, second_scale = change(w13, w2, ops.quantise_weights(w13)[1], ops.quantise_weights(w2)[1])
    with pytest.raises(error, match=text):
        ops.scaled_weights(first, second, w13_scale=first_scale, w2_scale=second_scale)


NAMES = ("dispatch_gemm", "gemm_combine", "mega_moe")


@pytest.mark.parametrize("op", NAMES)
@pytest.mark.parametrize("quantised", [False, True])
def test_what_a_call_hands_on_is_what_the_binding_reads(op, quantised, sessions):
    """Fields by name, as nvlink_ops.cu takes them out; pointers to what the caller gave; e4m3 tiles in e4m3 calls."""
    arguments = Arguments(quantised=quantised)
    arguments.call(op)
    (call, _), = sessions[0].calls
    assert set(call) == fields_of_binding()
    assert sessions[0].geometry.quantised == quantised
    variant = FUSED_VARIANTS["float8_e4m3fn" if quantised else "bfloat16"][call["variant"]]
    assert (variant.row_block, variant.gather_cols, variant.scatter_cols) == (64, 256, 256)
    assert call["rows"] == ROWS and call["num_tokens"] == TOKENS and not call["hidden_scales"]
    kept = arguments.kept
    for weight in {"dispatch_gemm": ("w13",), "gemm_combine": ("w2",), "mega_moe": ("w13", "w2")}[op]:
        scales = getattr(kept, f"{weight}_scales")
        assert call[weight] == getattr(kept, weight).data_ptr(), "weights are read as they are given"
        assert call[f"{weight}_scales"] == (scales.data_ptr() if quantised else 0)
    assert bool(call["activated_scales"]) == quantised and call["row_bytes"] == INTER * (1 if quantised else 2)
    assert call["scales_stride"] == (ROWS if quantised else 0)
    if op == "gemm_combine":
        assert call["activated"] == arguments.activated.data_ptr() and call["hidden_states"] == 0
        assert call["activated_scales"] == (arguments.activated_scales.data_ptr() if quantised else 0)


def test_results_are_bfloat16_but_for_the_activation(sessions):
    arguments = Arguments(quantised_rows=True)
    activated, offsets, slots, scales = arguments.call("dispatch_gemm")
    assert activated.dtype == E4M3 and activated.shape == (ROWS, INTER)
    assert scales.dtype == torch.float32 and scales.shape == (1, ROWS) and scales.is_contiguous()
    assert offsets.shape == (EXPERTS + 1,) and slots.shape == (TOKENS, 2)
    assert sessions[0].calls[0][0]["hidden_scales"] == arguments.hidden_scales.data_ptr()
    assert arguments.call("gemm_combine", activated=activated, activated_scales=scales).dtype == torch.bfloat16
    assert arguments.call("mega_moe").dtype == torch.bfloat16 and arguments.call("mega_moe").shape == (TOKENS, HIDDEN)
    assert len(Arguments(quantised=False).call("dispatch_gemm")) == 3


def test_a_rank_without_experts_hands_addresses_on(sessions, monkeypatch):
    """One expert on two ranks: the second one has none, and no scales."""
    arguments = Arguments(quantised_rows=True)
    w13, w2 = checkpoint(experts=0)
    arguments.kept, arguments.ids = ops.scaled_weights(w13, w2), torch.zeros(TOKENS, 1, dtype=torch.int32)
    arguments.weights = None
    pair = SimpleNamespace(world=2, rank=1, name="pair", process_group=None)
    arguments.call("dispatch_gemm", group=pair, num_experts=1)
    call = sessions[0].calls[0][0]
    assert call["w13"] and call["activated"] and call["w13_scales"] == 0 and call["rows"] == 64
    arguments.call("dispatch_gemm", group=pair, num_experts=1, hidden_states=arguments.hidden[:0],
                   hidden_scales=arguments.hidden_scales[:0], topk_ids=arguments.ids[:0], topk_weights=None)
    assert sessions[1].calls[0][0]["rows"] == 0 and sessions[1].calls[0][0]["activated"]


def test_signatures_tell_dtypes_apart(sessions):
    signatures = []
    for quantised, rows in ((False, False), (True, False), (True, True)):
        Arguments(rows, quantised).call("mega_moe")
        signatures.append(sessions[-1].calls[0][0]["signature"])
    assert signatures[0] != signatures[1] == signatures[2], "rows of one rank may come quantised, and another one's not"


WRONG = [  # (op, rows come quantised, weights are e4m3, changes, class, text)
    ("mega_moe", False, True, lambda a: dict(w13_scales=None), ArgumentError,
     r"w13 is float8_e4m3fn, so w13_scales \[E_local, 2I/128, H/128, 2\] = \[6, 2, 2, 2\] float32 are wanted"),
    ("mega_moe", False, True, lambda a: dict(w2_scales=None), ArgumentError, "w2 is float8_e4m3fn, so w2_scales"),
    ("mega_moe", True, True, lambda a: dict(hidden_scales=None), ArgumentError,
     r"hidden_states is float8_e4m3fn, so hidden_scales \[T, H/128\] = \[9, 2\] float32 are wanted"),
    ("mega_moe", False, True, lambda a: dict(hidden_scales=torch.ones(9, 2)), ArgumentError,
     "hidden_scales are given, but hidden_states is bfloat16"),
    ("mega_moe", True, True, lambda a: dict(hidden_scales=torch.ones(2, 9)), ArgumentError, "hidden_scales has shape"),
    ("mega_moe", True, True, lambda a: dict(hidden_scales=torch.ones(9, 2).bfloat16()), ArgumentTypeError,
     "hidden_scales has dtype bfloat16, wanted float32"),
    ("mega_moe", False, True, lambda a: dict(w2=a.kept.w2.float().bfloat16()), ArgumentTypeError,
     "w2 has dtype bfloat16, wanted float8_e4m3fn"),
    ("mega_moe", False, False, lambda a: dict(w2=Arguments().kept.w2), ArgumentTypeError, "w2 has dtype float8_e4m3fn"),
    ("mega_moe", False, False, lambda a: dict(w13_scales=torch.ones(6, 2, 2, 2)), ArgumentError,
     "w13_scales are given, but w13 is bfloat16"),
    ("mega_moe", False, False, lambda a: dict(w2_scales=torch.ones(6, 2, 1, 2)), ArgumentError,
     "w2_scales are given, but w2 is bfloat16"),
    ("mega_moe", True, False, lambda a: {}, ArgumentTypeError, "hidden_states has dtype float8_e4m3fn, wanted bfloat16"),
    ("mega_moe", False, True, lambda a: dict(w13_scales=a.kept.w13_scales[..., 0]), ArgumentError, "w13_scales has shape"),
    ("mega_moe", False, True, lambda a: dict(w2_scales=a.kept.w2_scales.double()), ArgumentTypeError,
     "w2_scales has dtype float64"),
    ("mega_moe", False, True, lambda a: dict(hidden_states=a.hidden[:, :200]), ArgumentError,
     r"hidden_states.size\(1\) is 200, wanted a multiple of 128 \(e4m3: a scale covers 128 columns\).*128 and 256"),
    ("mega_moe", False, True, lambda a: dict(w13=a.kept.w13[:, :192]), ArgumentError, r"w13.size\(1\) is 192"),
    ("mega_moe", False, True, lambda a: dict(w13_scales="w13"), ArgumentTypeError, "w13_scales must be a tensor"),
    ("dispatch_gemm", False, True, lambda a: dict(w13_scales=None), ArgumentError, "w13 is float8_e4m3fn, so w13_scales"),
    ("dispatch_gemm", False, False, lambda a: dict(hidden_scales=torch.ones(9, 2)), ArgumentError, "hidden_scales are given"),
    ("gemm_combine", False, True, lambda a: dict(activated_scales=None), ArgumentError,
     r"activated is float8_e4m3fn, so activated_scales \[I/128, rows\] = \[1, 448\] float32 are wanted"),
    ("gemm_combine", False, True, lambda a: dict(activated_scales=a.activated_scales.t()), ArgumentError,
     "activated_scales has shape"),
    ("gemm_combine", False, True, lambda a: dict(w2_scales=None), ArgumentError, "w2 is float8_e4m3fn, so w2_scales"),
    ("gemm_combine", False, False, lambda a: dict(activated_scales=torch.ones(1, ROWS)), ArgumentError,
     "activated_scales are given, but activated is bfloat16"),
    ("gemm_combine", False, True, lambda a: dict(activated=a.activated[:200], activated_scales=a.activated_scales[:, :200]),
     ArgumentError, "activated has 200 rows, wanted at least 448"),
    ("gemm_combine", False, True, lambda a: dict(activated=torch.zeros(450, INTER, dtype=torch.uint8).view(E4M3),
                                                 activated_scales=torch.ones(1, 450)), ArgumentError,
     "activated has 450 rows, wanted a multiple of 4 in e4m3"),
    ("gemm_combine", False, True, lambda a: dict(activated=a.activated[:, :64], activated_scales=a.activated_scales), ArgumentError,
     r"activated.size\(1\) is 64, wanted a multiple of 128"),
]


@pytest.mark.parametrize("op, rows, quantised, changes, error, text", WRONG)
def test_krn_16_wrong_arguments_get_one_sentence(op, rows, quantised, changes, error, text, sessions):
    arguments = Arguments(rows, quantised)
    with pytest.raises(error, match=text):
        arguments.call(op, **changes(arguments))
    assert not sessions, "no workspace is made for a call that is refused"


def test_activations_with_more_rows_than_wanted_keep_their_stride(sessions):
    arguments = Arguments()
    more, scales = torch.zeros(ROWS + 4, INTER, dtype=torch.uint8).view(E4M3), torch.ones(1, ROWS + 4)
    arguments.call("gemm_combine", activated=more, activated_scales=scales)
    assert sessions[0].calls[0][0]["rows"] == ROWS + 4


@pytest.mark.parametrize("op", NAMES)
@pytest.mark.parametrize("quantised_rows", [False, True])
def test_e4m3_on_the_cpu_is_one_clear_error(op, quantised_rows):
    arguments, kept = Arguments(quantised_rows), Arguments().kept
    calls = {
        "dispatch_gemm": lambda: ops.dispatch_gemm(arguments.hidden, arguments.ids, kept.w13, num_experts=EXPERTS, group=SINGLE,
                                                   w13_scales=kept.w13_scales, hidden_scales=arguments.hidden_scales),
        "gemm_combine": lambda: ops.gemm_combine(arguments.activated, arguments.ids, kept.w2, num_experts=EXPERTS, group=SINGLE,
                                                 activated_scales=arguments.activated_scales, w2_scales=kept.w2_scales),
        "mega_moe": lambda: ops.mega_moe(arguments.hidden, arguments.ids, arguments.weights, kept.w13, kept.w2,
                                         num_experts=EXPERTS, group=SINGLE, w13_scales=kept.w13_scales, w2_scales=kept.w2_scales,
                                         hidden_scales=arguments.hidden_scales)}
    with pytest.raises(ArgumentError, match="the CPU back end computes in bfloat16 and float32: e4m3 wants tensors on GPUs"):
        calls[op]()
    ops.release_ops_memory()


@pytest.mark.parametrize("name", ["hidden_scales", "w13_scales", "w2_scales"])
def test_scales_with_bfloat16_on_the_cpu_are_refused(name):
    arguments = Arguments(quantised=False)
    with pytest.raises(ArgumentError, match=f"{name} are given, but the CPU back end"):
        ops.mega_moe(arguments.hidden, arguments.ids, arguments.weights, arguments.kept.w13, arguments.kept.w2, num_experts=EXPERTS,
                     group=SINGLE, **{name: torch.ones(1)})
    ops.release_ops_memory()


def test_the_checks_name_what_a_call_in_e4m3_is():
    assert cuda_checks.is_e4m3(torch.zeros(1, dtype=torch.uint8).view(E4M3))
    assert not cuda_checks.is_e4m3(torch.zeros(1)) and not cuda_checks.is_e4m3("w13")
