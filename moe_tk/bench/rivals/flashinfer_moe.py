"""FlashInfer's local layer (cutlass_fused_moe, bf16: sort, both GEMMs, SwiGLU and combine behind one call) between an all-gather
and a reduce-scatter. NEVER RUN WITH THE REAL LIBRARY: written after the signature and the checks of its version 0.7, and tested
with a stand-in only. A failure is shown in the table.

What it takes: ids of all experts (int32; it skips those of other ranks), weights float32, both contiguous; w13 with the up rows
first; equally many experts on every rank. Its tactics are tuned, and its workspace allocated, once for the rows of the call.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch

from moe_tk.bench.contender import Call, NotAvailable
from moe_tk.bench.problem import Batch, Problem
from moe_tk.bench.rivals.exchange import Exchange

WIDTH_STEP = 8  # elements of bfloat16 in the 16 bytes that its TMA loads want rows to be a multiple of


class Rival:
    """The layer around FlashInfer's."""

    ours = False

    def __init__(self, name: str, problem: Problem, ranks: Any) -> None:
        """Raises NotAvailable."""
        self.name, self.problem, self.ranks = name, problem, ranks
        self.library, self.moe = _libraries(problem.device)
        _check_split(problem)
        w13, self.w2 = problem.local_weights()
        gate, up = w13.chunk(2, dim=1)
        self.w31 = torch.cat([up, gate], 1)
        mine, alone = (problem.world, problem.rank), (1, 0)
        (ep_size, ep_rank), (tp_size, tp_rank) = (mine, alone) if problem.mode == "ep" else (alone, mine)
        self.split = {"tp_size": tp_size, "tp_rank": tp_rank, "ep_size": ep_size, "ep_rank": ep_rank}

    def prepare(self, batch: Batch) -> Call:
        call = _FlashInferCall(self, batch)
        call.gather()
        with self.library.autotune(True):
            call.compute()
        return Call(call.run, call.exchange.out)

    def finish(self) -> None:
        self.ranks.synchronize()


class _FlashInferCall:
    """Buffers of one batch, and the call."""

    def __init__(self, rival: Rival, batch: Batch) -> None:
        self.rival, self.exchange = rival, Exchange(rival.problem, rival.ranks, batch)
        self.ids, self.weights = (part.contiguous() for part in (self.exchange.ids, self.exchange.weights))
        self.partial = torch.empty_like(self.exchange.tokens)
        self.options = {**rival.split, "tune_max_num_tokens": self.partial.shape[0], **self._workspace()}

    def _workspace(self) -> dict[str, torch.Tensor]:
        """Scratch memory for all calls. Older versions cannot be given any: they allocate it in each call."""
        rival, moe = self.rival, self.rival.moe
        if not hasattr(moe, "cutlass_fused_moe_workspace_size"):
            return {}
        tokens, hidden = self.partial.shape
        experts, _, inter = rival.w2.shape
        size = moe.cutlass_fused_moe_workspace_size(
            tokens, hidden, inter, experts * rival.split["ep_size"], self.ids.shape[1], x_dtype=self.partial.dtype,
            weight_dtype=rival.w2.dtype, output_dtype=self.partial.dtype, device=self.partial.device, **rival.split)
        return {"workspace_buffer": torch.empty(size, dtype=torch.uint8, device=self.partial.device)}

    def run(self) -> None:
        self.gather()
        self.compute()
        self.exchange.reduce(self.partial)

    def gather(self) -> None:
        """Everybody's tokens and routing. The routing is taken apart while the tokens are on their way."""
        routing_work, tokens_work = self.exchange.gather()
        if routing_work is not None:
            routing_work.wait()
        self.ids.copy_(self.exchange.ids)
        self.weights.copy_(self.exchange.weights)
        if tokens_work is not None:
            tokens_work.wait()

    def compute(self) -> None:
        """This rank's partial sums for everybody's tokens."""
        self.rival.moe.cutlass_fused_moe(
            input=self.exchange.tokens, token_selected_experts=self.ids, token_final_scales=self.weights,
            fc1_expert_weights=self.rival.w31, fc2_expert_weights=self.rival.w2, output_dtype=self.partial.dtype, quant_scales=[],
            output=self.partial, **self.options)


def _libraries(device: torch.device) -> tuple[Any, Any]:
    """flashinfer and flashinfer.fused_moe."""
    try:
        library, moe, utils = (importlib.import_module(f"flashinfer{part}") for part in ("", ".fused_moe", ".utils"))
    except ImportError as error:
        raise NotAvailable(f"not installed: {error}") from None
    if not hasattr(moe, "cutlass_fused_moe") or not hasattr(library, "autotune"):
        raise NotAvailable("this FlashInfer has no cutlass_fused_moe, or no autotune")
    try:
        utils.get_compute_capability(device)
    except ValueError as error:
        raise NotAvailable(f"FlashInfer: {error}") from None
    return library, moe


def _check_split(problem: Problem) -> None:
    """Its ranks own experts num_local * ep_rank and on, and rows of weights come by TMA."""
    experts, hidden, inter = problem.shape.experts, problem.shape.hidden, problem.inter
    if problem.mode == "ep" and experts % problem.world:
        raise NotAvailable(f"FlashInfer wants equally many experts on every rank: {experts} on {problem.world} ranks")
    for name, width in (("H", hidden), ("I of a rank", inter)):
        if width == 0 or width % WIDTH_STEP:
            raise NotAvailable(f"FlashInfer wants multiples of {WIDTH_STEP}: {name} is {width}")
