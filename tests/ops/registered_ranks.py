"""What the ranks of the torch.compile tests do. Imports no pytest: every rank loads this module."""

from __future__ import annotations

import torch
from moe_cases import LayerCase, digest
from torch.distributed.device_mesh import init_device_mesh

from moe_tk import ops
from moe_tk.weights import shard_weights


def compiled_ops(rank: int, world: int, case: LayerCase) -> None:
    """Each op inside a compiled function (fullgraph) gives the bits of the eager call."""
    hidden, ids, weights = case.inputs(0, world, rank)
    w13, w2 = shard_weights(*case.weights(), mode="ep", world=world, rank=rank)
    dense = torch.ones(5, case.hidden)
    wide = torch.ones(world * case.counts[0][rank], case.hidden)

    def gathered(x):
        return ops.ag_gemm(x * 2, dense) + 1

    def scattered(x):
        return ops.gemm_rs(x * 2, torch.ones(8, case.hidden)) + 1

    def steps(x):
        activated, offsets, slots = ops.dispatch_gemm(x * 2, ids, w13, num_experts=case.num_experts)
        return ops.gemm_combine(activated, ids, w2, num_experts=case.num_experts,
                                topk_weights=weights) + offsets.sum() + slots.sum()

    def named(x):
        return ops.ag_gemm(x, dense, group=torch.distributed.group.WORLD, timeout_s=5.0)

    mesh = init_device_mesh("cpu", (world,))

    def meshed(x):
        return ops.ag_gemm(x, dense, group=mesh)

    def whole(x):
        return ops.mega_moe(x * 2, ids, weights, w13, w2, num_experts=case.num_experts) + 1

    for function, x in ((gathered, hidden), (scattered, wide), (steps, hidden), (named, hidden), (meshed, hidden), (whole, hidden)):
        compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
        assert digest(compiled(x)) == digest(function(x)), function.__name__


def compiled_layers(rank: int, world: int, case: LayerCase) -> None:
    """Two layers in one compiled function, one of them for its effect only: both are called, in order, with any T."""
    first, second = case.layer(), case.layer()

    def both(x, ids, weights):
        first(x, ids, weights)  # nobody looks at the result, yet the other ranks wait for it
        out = torch.full_like(x, float("nan"))
        second(x * 2, ids, weights, out=out)
        return out + 1

    compiled = torch.compile(both, fullgraph=True, backend="aot_eager")
    calls = 0
    for epoch in range(len(case.counts)):
        inputs = case.inputs(epoch, world, rank)
        assert digest(compiled(*inputs)) == digest(both(*inputs))
        calls += 2 * int(((inputs[1] >= 0) & (inputs[1] < case.num_experts)).sum())
    for layer in (first, second):
        total = torch.tensor([int(layer.expert_load.sum()), calls])
        torch.distributed.all_reduce(total)
        assert int(total[0]) == int(total[1]), "a call was dropped or made twice"
    torch.compiler.reset()
