"""Other ways to compute the same layer, each behind one interface. Names and modules only: nothing is imported before use."""

from __future__ import annotations

from typing import Any

NAMES = {
    "torch": "moe_tk.bench.rivals.torch_gemm",
    "triton": "moe_tk.bench.rivals.triton_gemm",
    "deepgemm": "moe_tk.bench.rivals.deepgemm_gemm",
    "flashinfer": "moe_tk.bench.rivals.flashinfer_moe",
}


def make_rival(name: str, problem: Any, ranks: Any) -> Any:
    """The rival `name` (one of NAMES) for a problem. Raises NotAvailable, with the reason, where it cannot run.

    Its module has `Gemm`, which goes into the frame of rivals.serial, or `Rival`, a contender of its own.
    """
    import importlib

    from moe_tk.bench.rivals.serial import SerialRival

    module = importlib.import_module(NAMES[name])
    if hasattr(module, "Rival"):
        return module.Rival(name, problem, ranks)
    return SerialRival(name, problem, ranks, module.Gemm)
