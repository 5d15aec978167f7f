"""What the ranks do in the tests of moe_tk.ops in e4m3 on CUDA. Each function runs on every rank and asserts.

Oracles as in checks_fp8: float64 over the values of the quantised weights and rows, with the activation rounded to e4m3 as the
kernel does it, and without. And the e4m3 layer, whose results are bitwise the same.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import pytest
import torch
from torch.library import opcheck

from moe_tk import ops, reference
from moe_tk.errors import ArgumentError, MoETkError, PeerRefused
from moe_tk.memory.layout import end_of
from moe_tk.ops import cuda_sessions, functional
from moe_tk.schedule import Tables, build_tables
from moe_tk.weights import gemm as gemm_weights
from tests.cuda.checks import Case, Ranks
from tests.cuda.checks_fp8 import BUDGET, E4M3, EXACT_BUDGET, ScaledData, fp8_layer, oracle
from tests.cuda.checks_ops import alone, both, poison

Results = tuple[torch.Tensor, ...]

FEW = 10**4  # activations with which errors have no mean yet


def budgets(activations: int) -> tuple[float, float]:
    """Relative errors that are allowed against the two oracles. One of few activations that falls to the other side of the middle
    between two e4m3 values is off by up to an eighth, and may be a good part of the norm."""
    return (EXACT_BUDGET, BUDGET) if activations >= FEW else (2 * BUDGET, 2 * BUDGET)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """What equality of results is asked of: e4m3 has none of its own, and NaN is not equal to itself."""
    return tensor.contiguous().view(torch.uint8)


def equal(first: Results, second: Results) -> bool:
    return all(torch.equal(bits(a), bits(b)) for a, b in zip(first, second, strict=True))


@dataclass(frozen=True)
class ScaledRouted:
    """One call of the routed ops in e4m3. given: rows come quantised, else the kernel does it; None: rank 0's alone do.
    weighted: the activation is multiplied by the routing weights, else the experts' outputs are."""

    ranks: Ranks
    data: ScaledData
    case: Case
    weighted: bool
    given: bool | None

    @property
    def options(self) -> dict:
        case = self.case
        return dict(num_experts=case.experts, mode=case.mode, tokens_per_rank=case.max_tokens, group=self.ranks.group)

    @cached_property
    def kept(self) -> ops.ScaledWeights:
        data = self.data
        w13, w2 = data.shard(data.q13, data.q2)
        w13_scale, w2_scale = data.shard(data.s13, data.s2)
        return ops.scaled_weights(w13, w2, w13_scale=w13_scale, w2_scale=w2_scale)

    @cached_property
    def arguments(self) -> tuple[tuple[torch.Tensor, ...], torch.Tensor | None]:
        """((hidden_states, topk_ids, topk_weights), hidden_scales)."""
        x, ids, weights = self.data.mine()
        if not (self.ranks.rank == 0 if self.given is None else self.given):
            return (x, ids, weights), None
        rows, scales = gemm_weights.quantise_rows(x)
        return (rows, ids, weights), scales.t()  # strided: a copy is made

    def dispatch(self) -> Results:
        (x, ids, weights), scales = self.arguments
        return ops.dispatch_gemm(x, ids, self.kept.w13, topk_weights=weights if self.weighted else None,
                                 w13_scales=self.kept.w13_scales, hidden_scales=scales, **self.options)

    def combine(self, activated: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        (_, ids, weights), _ = self.arguments
        return ops.gemm_combine(activated, ids, self.kept.w2, topk_weights=None if self.weighted else weights,
                                activated_scales=scales, w2_scales=self.kept.w2_scales, **self.options)

    def mega(self) -> torch.Tensor:
        arguments, scales = self.arguments
        kept = self.kept
        return ops.mega_moe(*arguments, kept.w13, kept.w2, weight_position="before_l2" if self.weighted else "combine",
                            w13_scales=kept.w13_scales, w2_scales=kept.w2_scales, hidden_scales=scales, **self.options)

    def all(self) -> Results:
        """Results of dispatch_gemm, then of gemm_combine on them, then of mega_moe."""
        dispatched = self.dispatch()
        return (*dispatched, self.combine(dispatched[0], dispatched[3]), self.mega())

    def tables(self) -> Tables:
        case, world = self.case, self.ranks.world
        row_block = functional.routed_row_block(True, world=world, tokens_per_rank=case.max_tokens, top_k=case.top_k,
                                                num_experts=case.experts)
        return build_tables(self.data.ids[:world * case.max_tokens], token_counts=[case.count(r) for r in range(world)],
                            world=world, rank=self.ranks.rank, num_experts=case.experts, mode=case.mode, row_block=row_block)

    def check_dispatch(self, activated: torch.Tensor, offsets: torch.Tensor, slots: torch.Tensor, scales: torch.Tensor) -> None:
        case, tables, device = self.case, self.tables(), activated.device
        assert torch.equal(offsets.cpu(), tables.expert_offsets) and torch.equal(slots.cpu(), tables.slots), case
        assert activated.dtype == E4M3 and scales.dtype == torch.float32
        assert scales.shape == (activated.shape[1] // 128, activated.shape[0]), (case, scales.shape)
        pairs = torch.full((activated.shape[0],), -1, device=device)
        pairs[:tables.slot_pair.numel()] = tables.slot_pair.to(device).long()
        empty = pairs < 0
        assert bool((bits(activated)[empty] == 0).all()) and bool((scales[:, empty] == 1).all()), f"{case}: rows of no pair"
        want = self.activations(pairs, tables)
        got = gemm_weights.dequantise_rows(activated, scales)
        rounded = gemm_weights.dequantise_rows(*gemm_weights.quantise_rows(want.float()))
        exact, unrounded = reference.relative_error(got, rounded), reference.relative_error(got, want)
        allowed = budgets(int((~empty).sum()) * activated.shape[1])
        assert exact <= allowed[0] and unrounded <= allowed[1], f"dispatch_gemm {case}: {exact} and {unrounded}"

    def activations(self, pairs: torch.Tensor, tables: Tables) -> torch.Tensor:
        """[rows, I] float64 of this rank, from the values of rows and weights; zero where no pair is."""
        data, case = self.data, self.case
        values = gemm_weights.dequantise_rows(*gemm_weights.quantise_rows(data.x)).double()
        w13 = data.shard(data.values13, data.values2)[0].double()
        want = torch.zeros(len(pairs), w13.shape[1] // 2, dtype=torch.float64, device=pairs.device)
        bounds = tables.expert_offsets.tolist()
        for expert in range(w13.shape[0]):
            here = torch.arange(bounds[expert], bounds[expert + 1], device=pairs.device)
            here = here[pairs[here] >= 0]
            act = reference.activate(*(values[pairs[here] // case.top_k] @ w13[expert].T).chunk(2, 1))
            if self.weighted:
                act *= data.weights.to(pairs.device).reshape(-1)[pairs[here]].double()[:, None]
            want[here] = act
        return want

    def check_out(self, name: str, out: torch.Tensor) -> None:
        x, ids, weights = self.data.mine()
        assert out.dtype == torch.bfloat16 and out.shape == x.shape
        rows = gemm_weights.dequantise_rows(*gemm_weights.quantise_rows(x))
        for quantises, budget in zip((True, False), budgets(len(x) * self.case.top_k * self.case.inter), strict=True):
            want = oracle(rows, ids, weights, self.data.values13, self.data.values2, self.weighted, quantises)
            error = reference.relative_error(out, want)
            assert error <= budget, f"{name} {self.case} weighted {self.weighted} given {self.given}: {error}, {quantises}"


CASES = [
    Case(64, 2, 8, (64,), "ep", hidden=256, inter=128), Case(333, 8, 16, (333, 200), "ep", routing="zipf", hidden=512, inter=384),
    Case(333, 8, 16, (0, 333), "ep", hidden=640, inter=128),
    Case(333, 4, 16, (300, 333), "tp", None, None, "hot_expert", hidden=384, inter=256),
    Case(1, 1, 1, (1,), "ep", hidden=1536, inter=128), Case(1, 2, 3, (1, 0), "tp", hidden=128, inter=256),
    Case(1024, 4, 8, (1024, 1), "ep", hidden=1024, inter=768), Case(1024, 4, 6, (1024, 900), "tp", hidden=1024, inter=512),
    Case(64, 2, 3, (0,), "ep", hidden=128, inter=128)]


@both
def routed(ranks: Ranks) -> None:
    """dispatch_gemm, gemm_combine and mega_moe against the schedule and float64, with poisoned memory, bitwise equal when repeated;
    rows that are quantised by the kernel, by all callers, and by one. mega_moe is dispatch_gemm and gemm_combine."""
    for case in CASES:
        data = ScaledData(case, ranks)
        for weighted, given in ((True, False), (True, True), (False, False), (False, None)):
            call, results = ScaledRouted(ranks, data, case, weighted, given), []
            for _ in range(2):
                poison(ranks)
                results.append(call.all())
                ops.synchronize(ranks.group)
            call.check_dispatch(*results[0][:4])
            for name, out in zip(("gemm_combine", "mega_moe"), results[0][4:], strict=True):
                call.check_out(name, out)
            assert equal(*results), f"{case} weighted {weighted} given {given}: not bitwise equal when repeated"
            assert equal(results[0][4:5], results[0][5:]), f"{case}: mega_moe is not its two halves"
    for held in cuda_sessions._held.values():
        for session in held.sessions():
            g = session.geometry
            if getattr(g, "quantised", False):
                want = sum(end_of(items) for items in session.workspace.items_of(g))
                assert session.workspace.allocated_bytes == want, "memory is what the geometry says"


SMALL = Case(256, 4, 32, (256, 100), hidden=512, inter=256)


def like_the_layer(ranks: Ranks) -> None:
    """mega_moe on rows of weights gives the bits of the layer on tiles of them; bfloat16 calls between do not disturb."""
    for case in (SMALL, replace(SMALL, mode="tp", inter=512, weight_position="combine"),
                 Case(512, 2, 4, (512, 300), hidden=2048, inter=768)):
        data, layer = ScaledData(case, ranks), fp8_layer(case, ranks)
        data.load(layer)
        call = ScaledRouted(ranks, data, case, case.weight_position == "before_l2", False)
        args = data.mine()
        w13, w2 = data.shard(data.w13, data.w2)
        for _ in range(2):
            out = layer(*args)
            mega = call.mega()
            ops.mega_moe(*args, w13, w2, **call.options)
            layer.synchronize()
            ops.synchronize(ranks.group)
            assert torch.equal(mega, out), f"{case}: mega_moe is not the layer"


def back_to_back(ranks: Ranks) -> None:
    """dispatch_gemm after dispatch_gemm without a wait and with changing rows: rows are not overwritten, at the others or here,
    while they are still read, though nobody owes a partial row. Then all ops in any order."""
    calls = [ScaledRouted(ranks, ScaledData(SMALL, ranks, seed), SMALL, True, seed == 1) for seed in range(3)]
    expected = [tuple(result.clone() for result in call.all()) for call in calls]
    ops.synchronize(ranks.group)
    for call, results in zip(calls, expected, strict=True):
        call.check_dispatch(*results[:4])
        call.check_out("mega_moe", results[5])
    wrong = torch.zeros((), dtype=torch.int64, device=ranks.device)
    for step in range(600):
        if step % 97 == 5 * ranks.rank:
            torch.cuda._sleep(3_000_000)
        want, call = expected[step % 3], calls[step % 3]
        activated, _, _, scales = call.dispatch()
        wrong += (bits(activated) != bits(want[0])).any() | (bits(scales) != bits(want[3])).any()
        if step % 4 == 1:
            wrong += (call.combine(activated, scales) != want[4]).any()
        if step % 6 == 5:
            wrong += (call.mega() != want[5]).any()
    ops.synchronize(ranks.group)
    assert int(wrong) == 0


def graphs(ranks: Ranks) -> None:
    """The routed ops in one CUDA graph, with rows of both forms, captured after a first call, replayed with new data (GRF)."""
    calls = [ScaledRouted(ranks, ScaledData(SMALL, ranks), SMALL, True, given) for given in (False, True)]

    def step() -> Results:
        return tuple(result for call in calls for result in call.all())

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.Stream(), capture_error_mode="thread_local"):
        captured = step()
    for seed in range(4):
        for call in calls:
            (x, ids, weights), scales = call.arguments
            order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed)).to(ranks.device)
            for tensor in (bits(x), ids, weights, *(() if scales is None else (scales,))):
                tensor.copy_(tensor[order])
        for tensor in captured:
            bits(tensor).fill_(0x7f)
        graph.replay()
        eager = step()
        ops.synchronize(ranks.group)
        assert equal(captured, eager), f"replay {seed}"
        errors = [reference.relative_error(eager[base + 5], eager[5]) for base in (0, 6)]
        assert max(errors) <= EXACT_BUDGET, f"replay {seed}: the two forms of rows differ by {errors}"


def refusals(ranks: Ranks) -> None:
    """Bad e4m3 arguments on one rank, calls that differ, and ranks of two dtypes: computed by none, NaN, an error on each rank, all
    go on (KRN-07)."""
    data = ScaledData(SMALL, ranks)
    call = ScaledRouted(ranks, data, SMALL, True, False)
    call.all()
    ops.synchronize()
    (x, ids, weights), _ = call.arguments
    kept = call.kept
    if ranks.rank == 0:
        with pytest.raises(ArgumentError, match="w13 is float8_e4m3fn, so w13_scales"):
            ops.mega_moe(x, ids, weights, kept.w13, kept.w2, w2_scales=kept.w2_scales, **call.options)
        ops.synchronize()
        with pytest.raises(ArgumentError, match="hidden_scales are given, but hidden_states is bfloat16"):
            ops.dispatch_gemm(x, ids, kept.w13, w13_scales=kept.w13_scales, hidden_scales=torch.ones(1), **call.options)
        ops.synchronize()
    else:
        out = call.mega()
        with pytest.raises(PeerRefused, match="rank 0 refused"):
            ops.synchronize()
        assert out.isnan().all()
        check_nothing(call.dispatch())
        with pytest.raises(PeerRefused, match="rank 0 refused"):
            ops.synchronize()
    limit = 1.0 + ranks.rank
    out = ops.mega_moe(x, ids, weights, kept.w13, kept.w2, w13_scales=kept.w13_scales, w2_scales=kept.w2_scales, swiglu_limit=limit,
                       **call.options)
    with pytest.raises(MoETkError, match="ranks disagreed"):
        ops.synchronize()
    assert out.isnan().all()
    results = ops.dispatch_gemm(x, ids, kept.w13, w13_scales=kept.w13_scales, swiglu_limit=limit, **call.options)
    with pytest.raises(MoETkError, match="ranks disagreed"):
        ops.synchronize()
    check_nothing(results)
    two_dtypes(ranks)
    results = call.all()
    ops.synchronize()
    call.check_dispatch(*results[:4])
    call.check_out("mega_moe", results[5])


def check_nothing(results: Results) -> None:
    """Of a dispatch_gemm that was not computed."""
    activated, offsets, slots, scales = results
    assert bool(activated.float().isnan().all()) and bool(scales.isnan().all())
    assert bool((slots == -1).all()) and bool((offsets == 0).all())


def two_dtypes(ranks: Ranks) -> None:
    """One rank calls in bfloat16, the other one in e4m3, in sizes that have no workspace yet: both learn of it when it is made."""
    case = replace(SMALL, hidden=384, experts=16)
    data = ScaledData(case, ranks)
    call = ScaledRouted(ranks, data, case, True, False)
    with pytest.raises(MoETkError, match="workspace: rank 0 asked for .* but rank 1 asked for"):
        if ranks.rank == 0:
            ops.mega_moe(*data.mine(), *data.shard(data.w13, data.w2), **call.options)
        else:
            call.mega()
    call.mega()
    ops.synchronize()


def torch_ops(ranks: Ranks) -> None:
    """opcheck of the ops with scales (but for the schema, whose test cannot compare e4m3), and a compiled function (OPS-01)."""
    single = alone(ranks)
    case = Case(64, 2, 8, (33,), hidden=256, inter=128)
    data = ScaledData(case, single)
    call = ScaledRouted(single, data, case, True, True)
    ((x, ids, weights), scales), kept = call.arguments, call.kept
    dispatched = call.dispatch()
    ep = (case.experts, "ep", case.max_tokens)
    samples = {
        "dispatch_gemm_scaled": (x, ids, weights, kept.w13, *ep, "swiglu", None, "single", None, kept.w13_scales, scales),
        "gemm_combine": (dispatched[0], ids, None, kept.w2, *ep, "single", None, dispatched[3], kept.w2_scales),
        "mega_moe": (x, ids, weights, kept.w13, kept.w2, *ep[:2], "swiglu", None, "before_l2", "single", None, ep[2],
                     kept.w13_scales, kept.w2_scales, scales)}
    for name, arguments in samples.items():
        tests = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
        results = opcheck(getattr(torch.ops.moe_tk, name).default, arguments, test_utils=tests)
        assert set(results.values()) == {"SUCCESS"}, (name, results)
    whole = ScaledRouted(ranks, ScaledData(SMALL, ranks), SMALL, True, False)
    (x, ids, weights), _ = whole.arguments
    kept, sizes, name = whole.kept, (SMALL.experts, "ep", SMALL.max_tokens), ranks.group.name

    def steps(x, ids, weights):
        activated, _, _, scales = torch.ops.moe_tk.dispatch_gemm_scaled(
            x * 2, ids, weights, kept.w13, *sizes, "swiglu", None, name, None, kept.w13_scales)
        return torch.ops.moe_tk.gemm_combine(activated, ids, None, kept.w2, *sizes, name, None, scales, kept.w2_scales) + 1

    compiled = torch.compile(steps, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x, ids, weights), steps(x, ids, weights))
    ops.synchronize(ranks.group)
    torch.compiler.reset()
