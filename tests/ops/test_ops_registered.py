"""torch.ops.moe_tk.*: schemas, fake kernels, effects; opcheck and torch.compile."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from moe_cases import LayerCase
from registered_ranks import compiled_layers, compiled_ops
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck

from moe_tk import ops
from moe_tk.errors import MoETkError
from moe_tk.ops.registered import OPS

ROOT = Path(__file__).resolve().parents[2]
ALL_NAMES = [op._name for op in OPS]
NAMES = [name for name in ALL_NAMES if name != "dispatch_gemm_scaled"]  # e4m3: tests/nvlink/test_nvlink_ops_fp8_host.py


def samples(layer, tokens: int, dtype: torch.dtype = torch.float32) -> dict[str, tuple]:
    """Arguments of each op for one process."""
    x, ids, weights = torch.randn(tokens, 16).to(dtype), torch.randint(-1, 7, (tokens, 2)), torch.rand(tokens, 2)
    w13, w2 = torch.randn(6, 8, 16).to(dtype), torch.randn(6, 16, 4).to(dtype)
    rows = -(-tokens * 2 // 32) * 32 + 6 * 32
    return {
        "moe_layer": (x, ids, weights, layer.handle), "ag_gemm": (x, torch.randn(5, 16).to(dtype), "single", None),
        "gemm_rs": (x, torch.randn(8, 16).to(dtype), "", 5.0),
        "dispatch_gemm": (x, ids, weights, w13, 6, "ep", None, "swiglu", None, "single", None),
        "gemm_combine": (torch.randn(rows, 4).to(dtype), ids, None, w2, 6, "tp", None, "single", None),
        "mega_moe": (x, ids, weights, w13, w2, 6, "ep", "gpt_oss", 3.0, "combine", "single", None),
    }


def small_layer(dtype: torch.dtype = torch.float32):
    return LayerCase((), (), num_experts=6, top_k=2, hidden=16, inter=4, max_tokens=64, dtype=dtype).layer()


ONE_PROCESS = {"ScaledWeights", "grouped_gemm", "interleave_gate_up", "quantise_rows", "quantise_weights", "release_ops_memory",
               "scale_pairs", "scaled_weights", "synchronize"}


def test_every_op_between_ranks_is_registered():
    between = [name for name in ops.__all__ if name not in ONE_PROCESS]
    assert sorted(ALL_NAMES) == sorted(["moe_layer", "dispatch_gemm_scaled", *between])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("tokens", [9, 0])
def test_ops_01_opcheck(name, tokens, nothing_left):
    """Schema (no hidden mutation, no alias), autograd registration, fake kernel, and tracing with symbolic sizes: all pass."""
    layer = small_layer()
    op = getattr(torch.ops.moe_tk, name).default
    results = opcheck(op, samples(layer, tokens)[name])
    assert results == dict.fromkeys(["test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"],
                                    "SUCCESS")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ops_01_fake_outputs_are_like_real_ones(name, dtype, nothing_left):
    """Shape, dtype and strides, for several T, also where an input is strided."""
    layer = small_layer(dtype)
    op = getattr(torch.ops.moe_tk, name)
    for tokens in (0, 1, 33):
        arguments = samples(layer, tokens, dtype)[name]
        arguments = (arguments[0].T.contiguous().T, *arguments[1:])
        real = op(*arguments)
        with FakeTensorMode() as mode:
            fake = op(*(mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in arguments))
        for r, f in zip(real if isinstance(real, tuple) else (real,), fake if isinstance(fake, tuple) else (fake,), strict=True):
            assert (r.shape, r.dtype, r.stride()) == (f.shape, f.dtype, f.stride())


def test_ops_01_no_output_is_an_input(nothing_left):
    """Outputs are fresh memory, every time."""
    layer = small_layer()
    for name, arguments in samples(layer, 9).items():
        seen = [a.data_ptr() for a in arguments if isinstance(a, torch.Tensor)]
        kept = []
        for _ in range(2):
            result = getattr(torch.ops.moe_tk, name)(*arguments)
            kept.append(result)  # or its memory might be used again
            for tensor in result if isinstance(result, tuple) else (result,):
                assert tensor.data_ptr() not in seen
                seen.append(tensor.data_ptr())


def test_ops_01_registered_and_functional_level_agree(nothing_left):
    layer = small_layer()
    given = samples(layer, 9)
    x, weight, *_ = given["ag_gemm"]
    assert torch.ops.moe_tk.ag_gemm(x, weight, "single").equal(ops.ag_gemm(x, weight))
    x, ids, weights, w13, w2, *_ = given["mega_moe"]
    assert torch.ops.moe_tk.mega_moe(*given["mega_moe"]).equal(
        ops.mega_moe(x, ids, weights, w13, w2, num_experts=6, activation="gpt_oss", swiglu_limit=3.0, weight_position="combine"))
    x, ids, weights, handle = given["moe_layer"]
    assert torch.ops.moe_tk.moe_layer(x, ids, weights, handle).equal(layer(x, ids, weights))


def test_a_layer_that_is_gone_has_no_handle(nothing_left):
    layer = small_layer()
    x, ids, weights, handle = samples(layer, 3)["moe_layer"]
    del layer
    with pytest.raises(MoETkError, match=f"no MoELayer with handle {handle}"):
        torch.ops.moe_tk.moe_layer(x, ids, weights, handle)


@pytest.mark.parametrize("world", [1, 2])
def test_ops_01_compiled_ops_give_the_same_bits(run_ranks, world):
    run_ranks(world, compiled_ops, LayerCase(((9,) * world,), ("uniform",), num_experts=6, top_k=2, hidden=16, inter=4),
              limit_s=180.0)


@pytest.mark.parametrize("world", [1, 2])
def test_ops_01_compiled_layers_drop_and_reorder_nothing(run_ranks, world):
    counts = tuple(tuple(tokens + rank for rank in range(world)) for tokens in (9, 4, 30))
    run_ranks(world, compiled_layers, LayerCase(counts, ("uniform", "half", "out_of_range")), limit_s=180.0)


ORDERS = (
    "import moe_tk.ops; torch.ops.moe_tk.ag_gemm",
    "import moe_tk; moe_tk.ops; torch.ops.moe_tk.gemm_rs",
    "import moe_tk; moe_tk.MoELayer; torch.ops.moe_tk.moe_layer",
    "import moe_tk.layer, moe_tk.ops", "import moe_tk.ops.registered, moe_tk.layer", "import moe_tk.ops.sessions",
)
FORKS = """
import os, sys, traceback, torch
for code in sys.argv[1:]:
    child = os.fork()
    if child == 0:
        try:
            exec(code)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        sys.exit(f"failed: {code}")
"""


def python(*arguments: str) -> subprocess.CompletedProcess:
    """A new interpreter that sees this checkout."""
    return subprocess.run([sys.executable, "-c", *arguments], cwd=ROOT, env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
                          capture_output=True, text=True, timeout=120)


def test_import_orders():
    """The ops are there once moe_tk.ops or the layer has been used; no order of imports is a circle."""
    done = python(FORKS, *ORDERS)
    assert done.returncode == 0, done.stderr


def test_moe_tk_before_torch_and_alone():
    """Used before torch it brings the ops with it; import moe_tk alone registers nothing."""
    done = python("import moe_tk; moe_tk.ops.mega_moe; import torch; torch.ops.moe_tk.mega_moe")
    assert done.returncode == 0, done.stderr
    done = python("import torch, moe_tk; torch.ops.moe_tk.ag_gemm")
    assert done.returncode != 0 and "'_OpNamespace' 'moe_tk' object has no attribute 'ag_gemm'" in done.stderr
