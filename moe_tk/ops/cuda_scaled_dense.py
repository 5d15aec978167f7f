"""ag_gemm and gemm_rs in e4m3 on CUDA: the routed operations with one expert that every rank wants all rows of.

So slots are rows of the gathered tensor, and the tables are those that the first launch makes of such a routing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_tk.arguments import check_tensor
from moe_tk.group import RankGroup
from moe_tk.memory.nvlink_layout import SCALE_BLOCK
from moe_tk.memory.nvlink_ops_layout import ScaledDenseGeometry
from moe_tk.ops.cuda_checks import BF16, check_scaled_width, check_scales, check_unscaled, readable
from moe_tk.ops.cuda_sessions import checked, one_call
from moe_tk.ops.sizes import check_divides, routed_row_block
from moe_tk.planner import variant_index
from moe_tk.runtime.calls import signature_of
from moe_tk.runtime.nvlink_ops import OPEN, ROUTED_HAND_OUT, ROUTED_PRODUCT, ROUTED_SCATTER
from moe_tk.sizes import check_width
from moe_tk.weights.scaled import E4M3

SCALE_ROWS = 128  # scales are loaded for whole row blocks


def _check_weight(weight: Any, scales: Any, depth: int, layout: str, device: torch.device) -> tuple[Tensor, Tensor]:
    """(weight [N, K] of K = depth, its scale pairs)."""
    w = check_tensor("weight", weight, dtypes=(E4M3,), shape=(None, depth), layout=layout, device=device)
    check_width("weight.size(0)", w.shape[0])
    shape = (-(-w.shape[0] // SCALE_BLOCK), depth // SCALE_BLOCK, 2)
    return readable("weight", w), check_scales("weight_scales", scales, "weight", shape=shape, device=device,
                                               layout=layout[:-1].replace(",", "/128,") + "/128, 2]")


def padded_scales(scales: Tensor) -> Tensor:
    """Scales [K / 128, M] with room for whole row blocks behind the last row: a copy where M is not a multiple of 128."""
    return torch.nn.functional.pad(scales, (0, -scales.shape[1] % SCALE_ROWS)) if scales.shape[1] % SCALE_ROWS else scales


def _fields(session: Any, group: RankGroup, op: str, tokens: int, *equal: int) -> dict[str, Any]:
    """Fields that calls of `tokens` rows a rank have in common. equal: what else must be equal on all ranks."""
    row_block = routed_row_block(True, world=group.world, tokens_per_rank=tokens, top_k=1, num_experts=1)
    return {"topk_ids": session.zeros, "topk_weights": session.ones, "variant": variant_index("float8_e4m3fn", row_block),
            "signature": signature_of(op, "cuda", "float8_e4m3fn", tokens, *equal), "num_tokens": tokens,
            "rows": group.world * tokens}


def ag_gemm(x: Tensor, weight: Tensor, group: RankGroup, timeout_s: float | None, x_scales: Tensor | None,
            weight_scales: Tensor | None) -> Tensor:
    """all_gather(x) @ weight.T: [world * T, N] bfloat16. x as the hidden states of mega_moe. H is a multiple of 128, N of 8."""
    with one_call("ag_gemm", group, x.device, timeout_s) as (ops, seconds):

        def check() -> tuple[Tensor, ...]:
            rows = check_tensor("x", x, dtypes=(*BF16, E4M3), shape=(None, None), layout="[T, H]", device=x.device)
            hidden, scales = check_scaled_width("x.size(1)", rows.shape[1]), None
            if rows.dtype == E4M3:
                scales = check_scales("x_scales", x_scales, "x", shape=(rows.shape[0], hidden // SCALE_BLOCK), layout="[T, H/128]",
                                      device=x.device)
            else:
                check_unscaled("x_scales", x_scales, "x", rows.dtype)
            return readable("x", rows), scales, *_check_weight(weight, weight_scales, hidden, "[N, H]", x.device)

        rows, scales, w, w_scales = checked("ag_gemm", ops, seconds, check)
        (tokens, hidden), columns = rows.shape, w.shape[0]
        geometry = ScaledDenseGeometry.of(world=group.world, rank=group.rank, max_tokens=max(1, tokens), hidden=hidden,
                                          columns=columns, gathers=True)
        session = ops.session("ag_gemm", geometry, timeout_s=seconds)
        out = torch.empty(group.world * tokens, columns, dtype=torch.bfloat16, device=x.device)
        given = {} if scales is None else {"hidden_scales": scales}
        session.call({**_fields(session, group, "ag_gemm", tokens, hidden), **given, "hidden_states": rows, "w13": w,
                      "w13_scales": w_scales, "activated": out, "row_bytes": columns * out.element_size()},
                     stages=OPEN | ROUTED_PRODUCT | ROUTED_HAND_OUT, timeout_s=seconds, stream=ops.stream())
    return out


def gemm_rs(x: Tensor, weight: Tensor, group: RankGroup, timeout_s: float | None, x_scales: Tensor | None,
            weight_scales: Tensor | None) -> Tensor:
    """reduce_scatter(x @ weight.T): [M / world, N] bfloat16. x is e4m3 with scales [K / 128, M], as quantise_rows makes both. K is
    a multiple of 128, N of 8. Partial rows travel in bfloat16."""
    with one_call("gemm_rs", group, x.device, timeout_s) as (ops, seconds):

        def check() -> tuple[Tensor, ...]:
            rows = check_tensor("x", x, dtypes=(E4M3,), shape=(None, None), layout="[M, K]", device=x.device)
            depth = check_scaled_width("x.size(1)", rows.shape[1])
            check_divides(rows.shape[0], group.world)
            scales = check_scales("x_scales", x_scales, "x", shape=(depth // SCALE_BLOCK, rows.shape[0]), layout="[K/128, M]",
                                  device=x.device)
            return readable("x", rows), padded_scales(scales), *_check_weight(weight, weight_scales, depth, "[N, K]", x.device)

        rows, scales, w, w_scales = checked("gemm_rs", ops, seconds, check)
        tokens, columns = rows.shape[0] // group.world, w.shape[0]
        geometry = ScaledDenseGeometry.of(world=group.world, rank=group.rank, max_tokens=max(1, tokens), hidden=columns,
                                          columns=rows.shape[1], gathers=False)
        session = ops.session("gemm_rs", geometry, timeout_s=seconds)
        out = torch.empty(tokens, columns, dtype=torch.bfloat16, device=x.device)
        session.call({**_fields(session, group, "gemm_rs", tokens, columns), "activated": rows, "activated_scales": scales,
                      "scales_stride": scales.shape[1], "w2": w, "w2_scales": w_scales, "out": out},
                     stages=OPEN | ROUTED_SCATTER, timeout_s=seconds, stream=ops.stream())
    return out
