"""What the ranks do in the tests of the e4m3 layer on the CUDA back end. Each function runs on every rank and asserts.

Two oracles in float64, both over the values of the quantised weights and rows: `exact` quantises the activation again as the
kernel does, `unrounded` does not.
"""

from __future__ import annotations

import random

import pytest
import torch

from moe_tk import reference
from moe_tk.errors import ArgumentError, PeerRefused
from moe_tk.weights import gemm as gemm_weights
from moe_tk.weights import shard_weights
from tests.cuda.checks import Case, Data, Ranks, poisoned_call

E4M3 = torch.float8_e4m3fn
BUDGET = reference.ERROR_BUDGET[E4M3]
# Against an oracle that rounds at the same places. What is left: three roundings to bfloat16 (0.004), and activations near the
# middle between two e4m3 values that fall to the other side. The kernel's activation is off by d = 5e-4 (a fast tanh, 128
# products summed in 14 bits), a step is about s = 0.085 of a value, so d / s of them are off by s: sqrt(d * s) = 0.007.
EXACT_BUDGET = 1.5e-2


class ScaledData(Data):
    """Data with e4m3 weights, [E, 2I, H] and [E, H, I], and their scales."""

    def __init__(self, case: Case, ranks: Ranks, seed: int = 0) -> None:
        super().__init__(case, ranks, seed)
        self.q13, self.s13 = gemm_weights.quantise_weights(self.w13)
        self.q2, self.s2 = gemm_weights.quantise_weights(self.w2)
        self.values13 = gemm_weights.dequantise_weights(self.q13, self.s13)
        self.values2 = gemm_weights.dequantise_weights(self.q2, self.s2)

    def shard(self, w13: torch.Tensor, w2: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if w13.dtype == E4M3:
            return tuple(w.view(E4M3) for w in self.shard(w13.view(torch.uint8), w2.view(torch.uint8)))
        return shard_weights(w13, w2, mode=self.case.mode, world=self.ranks.world, rank=self.ranks.rank)

    def load(self, layer, quantised: bool = True) -> None:
        """The checkpoint's e4m3 weights, or the bfloat16 weights that they came from."""
        if not quantised:
            layer.load_weights(*self.shard(self.w13, self.w2))
            return
        w13, w2 = self.shard(self.q13, self.q2)
        w13_scale, w2_scale = self.shard(self.s13, self.s2)
        layer.load_weights(w13, w2, w13_scale=w13_scale, w2_scale=w2_scale)

    def errors(self, layer, out: torch.Tensor, args: tuple[torch.Tensor, ...]) -> tuple[float, float]:
        """Relative errors against the oracle that quantises the activation and the one that does not."""
        x, ids, weights = args
        rows = gemm_weights.dequantise_rows(*gemm_weights.quantise_rows(x))
        got = []
        for quantises in (True, False):
            want = oracle(rows, ids, weights, self.values13, self.values2, layer.weight_position == "before_l2", quantises)
            got.append(reference.relative_error(out, want))
        return got[0], got[1]

    def check(self, layer, out: torch.Tensor, args: tuple[torch.Tensor, ...], what: str) -> None:
        exact, unrounded = self.errors(layer, out, args)
        assert exact <= EXACT_BUDGET and unrounded <= BUDGET, f"{what}: {exact} and {unrounded}"


def oracle(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor, before_l2: bool,
           quantises: bool) -> torch.Tensor:
    """[T, H] float64 from the values of rows and weights; the activation is rounded to e4m3 if `quantises`."""
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    inter = w2.shape[2]
    for expert in range(w13.shape[0]):
        token, choice = torch.nonzero(ids == expert, as_tuple=True)
        if token.numel() == 0:
            continue
        both = x[token].double() @ w13[expert].double().T
        act = reference.activate(both[:, :inter], both[:, inter:])
        weight = weights[token, choice].double()[:, None]
        if before_l2:
            act = act * weight
        if quantises:
            act = gemm_weights.dequantise_rows(*gemm_weights.quantise_rows(act.float())).double()
        rows = act @ w2[expert].double().T
        out.index_add_(0, token, rows if before_l2 else rows * weight)
    return out


def fp8_layer(case: Case, ranks: Ranks, **options):
    return case.layer(ranks, dtype=E4M3, **options)


LAYER_CASES = [
    Case(64, 2, 8, (64,), "ep", 64, 1, hidden=256, inter=128),
    Case(64, 2, 8, (64,), "tp", 128, 1, hidden=256, inter=256, weight_position="combine"),
    Case(333, 8, 64, (333, 200), "ep", 128, 3, "zipf", hidden=512, inter=256),
    Case(333, 8, 64, (0, 333), "ep", 64, 2, hidden=640, inter=384, weight_position="combine"),
    Case(333, 8, 16, (300, 333), "tp", 128, 2, "hot_expert", hidden=1024, inter=512),
    Case(333, 8, 16, (300, 333), "tp", None, None, hidden=128, inter=256),
    Case(512, 6, 30, (500, 77), "ep", 128, 1, hidden=7168, inter=512),
    Case(512, 2, 3, (0,), "ep", 128, 1, hidden=1536, inter=128),
    Case(512, 1, 1, (512, 7), "ep", 64, 1, hidden=1536, inter=128),
    Case(512, 4, 32, (512,), "ep", None, None, "hot_rank", hidden=1024, inter=256),
    Case(1024, 8, 64, (1024,), "ep", 128, 2, hidden=2048, inter=768),
    Case(1024, 8, 64, (1024, 600), "tp", 128, 1, hidden=2048, inter=768)]


def sent_rows(ranks: Ranks) -> None:
    """Rows are quantised as torch does it (a value may fall to the neighbour, since 1 / scale is rounded), or sent as given;
    rows of zeros and of tiny values become zeros, and a NaN stays in its 128 columns. They come to whom they are for."""
    case = Case(200, 2, 8, (200, 77), hidden=640, inter=128)
    layer, data = fp8_layer(case, ranks), ScaledData(case, ranks)
    data.load(layer)
    data.x[0::50], data.x[1::50], data.x[2::50, 130] = 0, 1e-38, float("nan")
    data.x[3::50] *= 1e20
    x, ids, weights = data.mine()
    blocks, out = case.hidden // 128, torch.empty_like(x)
    want, scales = gemm_weights.quantise_rows(data.x)
    scales = scales.t()
    wanted = torch.zeros(len(data.x), dtype=torch.bool, device=x.device)
    first, count = layer._calls.geometry.first_expert, layer.num_local_experts
    wanted[((data.ids >= first) & (data.ids < first + count)).any(1).to(x.device)] = True
    for rank in range(ranks.world):
        wanted[rank * case.max_tokens + case.count(rank):(rank + 1) * case.max_tokens] = False
    for given in (False, True):
        layer.session.workspace.region("rows", torch.uint8).fill_(0xff)
        ranks.meet()
        mine = slice(ranks.rank * case.max_tokens, ranks.rank * case.max_tokens + len(x))
        rows, options = (want[mine], dict(hidden_scales=scales[mine].contiguous())) if given else (x, {})
        layer._calls.forward(rows, ids, weights, out, signature=7, stages=1, **options)
        layer.synchronize()
        ranks.meet()  # nobody waits for rows in the first launch
        sent = layer.session.workspace.region("rows", torch.uint8).view(len(data.x), -1)
        got = sent[:, :case.hidden].contiguous().view(E4M3)
        got_scales = sent[:, case.hidden:case.hidden + 4 * blocks].contiguous().view(torch.float32)
        assert (sent[~wanted] == 0xff).all(), "a row that nobody wants was sent"
        if given:
            assert torch.equal(got.view(torch.uint8)[wanted], want.view(torch.uint8)[wanted])
            assert torch.equal(got_scales[wanted].nan_to_num(7.0), scales[wanted].nan_to_num(7.0))
            continue
        normal = wanted[:, None].repeat(1, blocks)
        normal[1::50] = normal[2::50, 1] = False
        torch.testing.assert_close(got_scales[normal], scales[normal], rtol=3e-7, atol=0)
        nothing = torch.zeros_like(wanted)
        nothing[0::50] = nothing[1::50] = True
        assert got[nothing & wanted].float().abs().sum() == 0
        nan = torch.zeros_like(normal)
        nan[2::50, 1] = True
        assert torch.equal(got_scales.isnan() & wanted[:, None], nan & wanted[:, None])
        steps = (order_of(got) - order_of(want)).view(len(data.x), blocks, 128)[normal].abs()
        assert steps.max() <= 1 and (steps != 0).float().mean() < 1e-3


def order_of(x: torch.Tensor) -> torch.Tensor:
    """Place of each e4m3 value in the order of all."""
    bits = x.view(torch.uint8).int()
    return torch.where(bits < 128, bits, 128 - bits)


def layer_against_reference(ranks: Ranks) -> None:
    """The e4m3 layer against both oracles with poisoned buffers, bitwise equal when repeated; bfloat16 weights and rows give what
    their quantised forms give."""
    for case in LAYER_CASES:
        layer = fp8_layer(case, ranks)
        for seed in range(2):
            data = ScaledData(case, ranks, seed)
            data.load(layer)
            x, ids, weights = data.mine()
            ids = ids.to(torch.int32) if seed else ids
            outputs = []
            for repeat in range(3):
                if repeat == 2:
                    data.load(layer, quantised=False)
                outputs.append(poisoned_call(layer, ranks, (x, ids, weights)))
            data.check(layer, outputs[0], (x, ids, weights), f"{case} seed {seed}")
            assert torch.equal(outputs[0], outputs[1]), f"{case} seed {seed}: not bitwise equal when repeated"
            assert torch.equal(outputs[0], outputs[2]), f"{case} seed {seed}: bfloat16 weights give another result"
        print(f"{case}: {data.errors(layer, outputs[0], (x, ids, weights))}", flush=True)
        assert layer.memory.total == layer.session.workspace.allocated_bytes


SMALL = Case(512, 4, 32, (512,), hidden=1024, inter=256)


def given_scales(ranks: Ranks) -> None:
    """Rows that come as e4m3 with scales, also strided, from one rank or from all."""
    data, layer = ScaledData(SMALL, ranks), fp8_layer(SMALL, ranks)
    data.load(layer)
    x, ids, weights = data.mine()
    rows, scales = gemm_weights.quantise_rows(x)
    results = []
    for quantised in (ranks.rank == 0, True):
        out = layer(rows, ids, weights, hidden_scales=scales.t()) if quantised else layer(x, ids, weights)
        layer.synchronize()
        data.check(layer, out, (x, ids, weights), "given scales")
        results.append(out)
    assert results[0].dtype == torch.bfloat16


def back_to_back(ranks: Ranks) -> None:
    """500 calls without waiting, with changing T and routing."""
    data, layer = ScaledData(SMALL, ranks), fp8_layer(SMALL, ranks)
    data.load(layer)
    sizes = (0, 1, 7, 100, 512)
    for call in range(500):
        count = sizes[(call * 7 + ranks.rank * 3 * (call // 5)) % 5]
        args = data.mine(count, first=(call * 13) % (513 - count))
        out = layer(*args)
        if call % 50 == 49:
            layer.synchronize()
            if count >= 7:
                data.check(layer, out, args, f"call {call} with {count} tokens")
    layer.synchronize()


def graphs(ranks: Ranks) -> None:
    """Graphs of two sizes, replayed in random order with new data between eager calls."""
    data, layer = ScaledData(SMALL, ranks), fp8_layer(SMALL, ranks)
    data.load(layer)
    captured = {}
    for count in (8, 512):
        buffers = [*data.mine(count), torch.empty(count, SMALL.hidden, device=ranks.device, dtype=torch.bfloat16)]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.Stream(), capture_error_mode="thread_local"):
            layer(*buffers[:3], out=buffers[3])
        captured[count] = (graph, buffers)
    choose = random.Random(5)
    for step in range(40):
        kind, count = choose.choice((8, 512, 0)), 333
        order = torch.randperm(512, generator=torch.Generator().manual_seed(step)).to(ranks.device)
        x, ids, weights = (tensor[order] for tensor in data.mine(512))
        if kind:
            count, (graph, buffers) = kind, captured[kind]
            for buffer, tensor in zip(buffers, (x, ids, weights), strict=False):
                buffer.copy_(tensor[:count])
            buffers[3].fill_(float("nan"))
            graph.replay()
            out = buffers[3]
        else:
            out = layer(x[:count], ids[:count], weights[:count])
        layer.synchronize()
        data.check(layer, out, (x[:count], ids[:count], weights[:count]), f"step {step}, graph {kind}")


def refusals(ranks: Ranks) -> None:
    """Rows without their scales are refused on one rank, told to the others, and all may go on."""
    data, layer = ScaledData(SMALL, ranks), fp8_layer(SMALL, ranks)
    data.load(layer)
    x, ids, weights = data.mine()
    if ranks.rank == 0:
        with pytest.raises(ArgumentError, match="hidden_scales"):
            layer(x.to(E4M3), ids, weights)
        layer.synchronize()
    else:
        layer(x, ids, weights)
        with pytest.raises(PeerRefused, match="rank 0 refused"):
            layer.synchronize()
    out = layer(x, ids, weights)
    layer.synchronize()
    data.check(layer, out, (x, ids, weights), "after a refusal")
