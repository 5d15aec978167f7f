"""What the ranks do in the tests of the serial pattern in e4m3."""

from __future__ import annotations

from dataclasses import replace

import torch

from moe_tk.runtime.nvlink import nvlink_module
from moe_tk.runtime.nvlink_session import COMBINE, GEMM1, GEMM2, OPEN, PULL
from tests.cuda import checks_fp8, checks_serial
from tests.cuda.checks import Case, Ranks, poisoned_call
from tests.cuda.checks_fp8 import LAYER_CASES, SMALL, ScaledData, fp8_layer


def placed_rows(ranks: Ranks) -> None:
    """OPEN and PULL leave in each slot the row that was sent, with its scales, and nothing in the padding; few rows and many."""
    for case in (replace(SMALL, counts=(2, 1)), SMALL, replace(LAYER_CASES[6], counts=(3, 500)), replace(SMALL, counts=(0, 7))):
        layer, data = fp8_layer(case, ranks, pattern="serial"), ScaledData(case, ranks)
        data.load(layer)
        x, ids, weights = data.mine()
        workspace, slots = layer.session.workspace, layer._calls.geometry.max_slots
        ranks.meet()
        workspace.poison()
        workspace.region("rows", torch.uint8).fill_(0x55)  # what is copied too much is seen
        ranks.meet()
        layer._calls.forward(x, ids, weights, torch.empty_like(x), signature=7, stages=OPEN | PULL)
        layer.synchronize()
        pairs = workspace.local("slot_pair")[:int(workspace.local("counts")[0])].long()
        used = torch.nonzero(pairs >= 0)[:, 0]
        sent = workspace.region("rows", torch.uint8).view(ranks.world * case.max_tokens, -1)[pairs[used] // case.top_k]
        buffer, blocks = workspace.local_bytes("expert_out"), case.hidden // 128
        want = torch.full_like(buffer, 0xff)
        rows = want[:slots * case.hidden].view(slots, case.hidden)
        scales = want[rows.numel():rows.numel() + 4 * blocks * slots].view(torch.float32).view(blocks, slots)
        rows[used] = sent[:, :case.hidden]
        scales[:, used] = sent[:, case.hidden:case.hidden + 4 * blocks].contiguous().view(torch.float32).t()
        assert torch.equal(buffer, want), case
        ranks.meet()  # the next call of the others sends rows to where these are


def against_reference(ranks: Ranks) -> None:
    """The serial pattern against both oracles with poisoned buffers, repeated, and bitwise equal to the fused one."""
    for case in LAYER_CASES:
        serial, fused = fp8_layer(case, ranks, pattern="serial"), fp8_layer(case, ranks, pattern="two_kernel")
        assert serial.session is fused.session, "the patterns share a workspace"
        assert serial.memory.total == serial.session.workspace.allocated_bytes
        for seed in range(2):
            data = ScaledData(case, ranks, seed)
            data.load(serial)
            data.load(fused)
            args = data.mine()
            out = poisoned_call(serial, ranks, args)
            data.check(serial, out, args, f"{case} seed {seed}")
            assert torch.equal(out, poisoned_call(serial, ranks, args)), f"{case} seed {seed}: not bitwise equal when repeated"
            assert torch.equal(out, poisoned_call(fused, ranks, args)), f"{case} seed {seed}: not bitwise equal to the fused one"


def every_tile(ranks: Ranks) -> None:
    """Each pair of compiled tiles, on sizes with tails; all bitwise equal to the fused pattern."""
    case = Case(200, 4, 12, (200, 77), hidden=640, inter=384)
    data, tiles = ScaledData(case, ranks), nvlink_module().plain_tiles(True)
    args = data.mine()
    fused = fp8_layer(case, ranks, pattern="two_kernel")
    data.load(fused)
    want = poisoned_call(fused, ranks, args)
    data.check(fused, want, args, "two_kernel")
    for first, second in ((a, b) for a, one in enumerate(tiles) for b, two in enumerate(tiles)
                          if one["activates"] and one["row_block"] == two["row_block"]):
        layer = fp8_layer(replace(case, row_block=tiles[first]["row_block"]), ranks, pattern="serial")
        data.load(layer)
        layer._calls._plain_fields[len(args[0])] = {"passes": 1, "gemm1_tile": first, "gemm1_policy": first % 2,
                                                    "gemm2_tile": second, "gemm2_policy": second % 2}
        assert torch.equal(poisoned_call(layer, ranks, args), want), f"{tiles[first]['name']} and {tiles[second]['name']}"


def one_stage_at_a_time(ranks: Ranks) -> None:
    """The stages launched one by one give the call's result, also when a call's first GEMM is repeated with its rows."""
    data, layer = ScaledData(SMALL, ranks), fp8_layer(SMALL, ranks, pattern="serial")
    data.load(layer)
    args = data.mine()
    want = poisoned_call(layer, ranks, args)
    out = torch.full_like(want, float("nan"))
    ranks.meet()
    layer.session.workspace.poison()
    ranks.meet()
    for stage in (OPEN, PULL, GEMM1, GEMM1, GEMM2, PULL, GEMM1, GEMM2, GEMM2, COMBINE):
        layer._calls.forward(*args, out, signature=layer._signature, stages=stage, pattern="serial")
    layer.synchronize()
    assert torch.equal(out, want)


def mixed_patterns(ranks: Ranks) -> None:
    """Ranks that run different patterns meet in one call, with and without scales of their own."""
    for case in (SMALL, *LAYER_CASES[2:6]):
        serial, fused = (fp8_layer(case, ranks, pattern=pattern) for pattern in ("serial", "two_kernel"))
        data = ScaledData(case, ranks)
        args = data.mine()
        for layer in (serial, fused):
            data.load(layer)
        want = poisoned_call(fused, ranks, args)
        data.check(fused, want, args, str(case))
        outputs = []
        for turn in range(20):  # no wait between them: neither pattern may touch what the other still reads
            fused._calls.pattern = "serial" if (ranks.rank + turn // 2) % 2 else "two_kernel"
            outputs.append(fused(*args))
        fused.synchronize()
        assert all(torch.equal(out, want) for out in outputs), case


back_to_back = checks_serial.mixed(checks_fp8.back_to_back)
given_scales, graphs, refusals = map(checks_serial.serial, (checks_fp8.given_scales, checks_fp8.graphs, checks_fp8.refusals))
