"""torch.ops.moe_tk.* with scales, up to the launch: fake kernels, tracing, compiled functions, schemas."""

from __future__ import annotations

import pytest
import torch
from scaled_calls import E4M3, EXPERTS, HIDDEN, TOKENS, Arguments, Dense, bits
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck

from moe_tk import ops
from moe_tk.errors import ArgumentError
from moe_tk.ops import cuda_functional, functional, registered


def samples(arguments: Arguments) -> dict[str, tuple]:
    """Arguments of the torch ops."""
    a, kept, gathers, scatters = arguments, arguments.kept, Dense("ag_gemm"), Dense("gemm_rs")
    return {
        "ag_gemm": (gathers.x, gathers.weight, "single", None, gathers.x_scales, gathers.weight_scales),
        "gemm_rs": (scatters.x, scatters.weight, "single", None, scatters.x_scales, scatters.weight_scales),
        "dispatch_gemm_scaled": (a.hidden, a.ids, a.weights, kept.w13, EXPERTS, "ep", None, "swiglu", None, "single", None,
                                 kept.w13_scales, a.hidden_scales),
        "gemm_combine": (a.activated, a.ids, None, kept.w2, EXPERTS, "ep", None, "single", None, a.activated_scales,
                         kept.w2_scales),
        "mega_moe": (a.hidden, a.ids, a.weights, kept.w13, kept.w2, EXPERTS, "ep", "swiglu", None, "combine", "single", None, None,
                     kept.w13_scales, kept.w2_scales, a.hidden_scales)}


@pytest.fixture
def on_the_host(monkeypatch, sessions):
    """The functional level takes the way of CUDA tensors, up to the launch."""
    monkeypatch.setattr(functional, "_cuda_ops", lambda first: cuda_functional)
    monkeypatch.setattr(registered, "routed_row_block", lambda on_cuda, **sizes: functional.routed_row_block(True, **sizes))


@pytest.mark.parametrize("name", ["dispatch_gemm_scaled", "gemm_combine", "mega_moe", "ag_gemm", "gemm_rs"])
@pytest.mark.parametrize("quantised_rows", [False, True])
def test_ops_01_opcheck_with_scales(name, quantised_rows, on_the_host):
    """Autograd registration, fake kernel, tracing with symbolic sizes. The schema test cannot compare e4m3 tensors: torch has no
    arithmetic for them. So what it would see is looked at here: inputs keep their bits, and outputs are new memory."""
    arguments = samples(Arguments(quantised_rows))[name]
    op = getattr(torch.ops.moe_tk, name).default
    checks = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    assert opcheck(op, arguments, test_utils=checks) == dict.fromkeys(checks, "SUCCESS")
    given = [a for a in arguments if isinstance(a, torch.Tensor)]
    before = [bits(a).clone() for a in given]
    results = op(*arguments)
    results = results if isinstance(results, tuple) else (results,)
    assert all(torch.equal(bits(a), b) for a, b in zip(given, before, strict=True))
    addresses = [tensor.data_ptr() for tensor in (*given, *results)]
    assert len(set(addresses)) == len(addresses)
    with FakeTensorMode() as mode:
        fake = op(*(mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in arguments))
    for r, f in zip(results, fake if isinstance(fake, tuple) else (fake,), strict=True):
        assert (r.shape, r.dtype, r.stride()) == (f.shape, f.dtype, f.stride())


def test_a_bfloat16_call_of_the_scaled_torch_op_is_refused(on_the_host):
    a = Arguments(quantised=False)
    with pytest.raises(ArgumentError, match="w13 is torch.bfloat16, wanted float8_e4m3fn"):
        torch.ops.moe_tk.dispatch_gemm_scaled(a.hidden, a.ids, None, a.kept.w13, EXPERTS, "ep", None, "swiglu", None, "single")


def test_compiled_functions_call_the_ops_with_their_scales(on_the_host, sessions):
    a, kept = Arguments(quantised_rows=True), Arguments().kept
    options = dict(num_experts=EXPERTS)

    def steps(hidden, scales):
        activated, _, _, activated_scales = ops.dispatch_gemm(hidden, a.ids, kept.w13, w13_scales=kept.w13_scales,
                                                              hidden_scales=scales, **options)
        out = ops.gemm_combine(activated, a.ids, kept.w2, activated_scales=activated_scales, w2_scales=kept.w2_scales, **options)
        return out + ops.mega_moe(hidden, a.ids, a.weights, kept.w13, kept.w2, w13_scales=kept.w13_scales,
                                  w2_scales=kept.w2_scales, hidden_scales=scales, **options)

    out = torch.compile(steps, fullgraph=True, backend="aot_eager")(a.hidden, a.hidden_scales)
    assert out.dtype == torch.bfloat16 and out.shape == (TOKENS, HIDDEN)
    assert [sorted(name for name in call if name.endswith("_scales") and call[name]) for s in sessions for call, _ in s.calls] == [
        ["activated_scales", "hidden_scales", "w13_scales"], ["activated_scales", "w2_scales"],
        ["activated_scales", "hidden_scales", "w13_scales", "w2_scales"]]
    torch.compiler.reset()


def test_older_callers_of_the_torch_ops_need_no_scales():
    """New arguments are at the end and have defaults: schemas of graphs that were exported before still fit."""
    for name in ("mega_moe", "gemm_combine", "dispatch_gemm", "ag_gemm", "gemm_rs"):
        last = "tokens_per_rank" if name == "mega_moe" else "timeout_s"
        arguments = getattr(torch.ops.moe_tk, name).default._schema.arguments
        names = [argument.name for argument in arguments]
        after = arguments[names.index(last) + 1:]
        assert all(argument.has_default_value() and argument.name.endswith("_scales") for argument in after), name
    assert len(torch.ops.moe_tk.dispatch_gemm.default._schema.returns) == 3


def test_ops_01_fake_outputs_on_cuda_have_the_kernels_shapes():
    """More rows an expert than 96 or so: row blocks of 128, as the kernel has them, not the CPU's."""
    with FakeTensorMode():
        x = torch.empty(512, 128, dtype=torch.bfloat16, device="cuda")
        ids = torch.empty(512, 2, dtype=torch.int64, device="cuda")
        w13 = torch.empty(6, 512, 128, dtype=E4M3, device="cuda")
        scales = torch.empty(6, 4, 1, 2, device="cuda")
        activated, offsets, slots, out_scales = torch.ops.moe_tk.dispatch_gemm_scaled(x, ids, None, w13, 6, "ep", None, "swiglu",
                                                                                      None, "single", None, scales)
        rows = 128 * (8 + 6)
        assert activated.shape == (rows, 256) and activated.dtype == E4M3 and activated.is_cuda
        assert out_scales.shape == (2, rows) and out_scales.dtype == torch.float32 and offsets.shape == (7,)
