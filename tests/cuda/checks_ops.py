"""What the ranks do in the tests of moe_tk.ops on CUDA. Each function runs on every rank and asserts; most of them do it twice,
in a group of all ranks and in a group of this process alone."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, replace

import pytest
import torch
from torch.library import opcheck

import moe_tk
from moe_tk import ops, reference
from moe_tk.errors import ArgumentTypeError, MoETkError, PeerRefused, ProtocolTimeout
from moe_tk.group import SINGLE
from moe_tk.ops import cuda_sessions, functional
from moe_tk.schedule import build_tables, make_routing
from moe_tk.weights import shard_weights
from tests.cuda.checks import BUDGET, Case, Data, Ranks


def alone(ranks: Ranks) -> Ranks:
    """The same process as a group of its own."""
    single = replace(ranks, rank=0, world=1)
    single.group = SINGLE
    return single


def both(check):
    """Runs a check in a group of all ranks, then in a group of this process."""

    def run(ranks: Ranks) -> None:
        check(ranks)
        if ranks.world > 1:
            check(alone(ranks))

    run.__doc__ = check.__doc__
    return run


def poison(ranks: Ranks) -> None:
    """NaN in all workspaces and in the memory that new tensors get; nobody is in a call meanwhile."""
    ranks.meet()
    for held in cuda_sessions._held.values():
        for session in held.sessions():
            if session.group.world == ranks.world:
                session.workspace.poison()
    blocks = [torch.full((size,), float("nan"), device=ranks.device) for size in (100, 5000, 10**5, 4 * 10**5, 3 * 10**6)]
    del blocks
    ranks.meet()


def draw(seed: int, *shape: int, device: torch.device) -> torch.Tensor:
    generator = torch.Generator(device=device).manual_seed(seed)
    return torch.randn(*shape, device=device, generator=generator).bfloat16()


class Dense:
    """Operands of a dense op on all ranks, the same on each."""

    def __init__(self, ranks: Ranks, tokens: int, depth: int, columns: int, seed: int = 0) -> None:
        self.ranks, self.tokens = ranks, tokens
        world, device = ranks.world, ranks.device
        self.x = draw(seed + 1, world * tokens, depth, device=device)  # ag_gemm: rows of all ranks
        self.weight = draw(seed + 2 + ranks.rank, columns + 8 * ranks.rank, depth, device=device)  # widths differ
        depths = [depth + 8 * rank for rank in range(world)]
        self.parts = [draw(seed + 50 + rank, world * tokens, depths[rank], device=device) for rank in range(world)]
        self.weights = [draw(seed + 90 + rank, columns, depths[rank], device=device) for rank in range(world)]

    @property
    def mine(self) -> slice:
        return slice(self.ranks.rank * self.tokens, (self.ranks.rank + 1) * self.tokens)

    def gather(self) -> torch.Tensor:
        return ops.ag_gemm(self.x[self.mine], self.weight, group=self.ranks.group)

    def scatter(self) -> torch.Tensor:
        return ops.gemm_rs(self.parts[self.ranks.rank], self.weights[self.ranks.rank], group=self.ranks.group)

    def check(self, gathered: torch.Tensor | None, scattered: torch.Tensor | None, what: object) -> None:
        if gathered is not None:
            want = self.x.double() @ self.weight.double().T
            assert gathered.shape == want.shape
            error = reference.relative_error(gathered, want)
            assert error <= BUDGET, f"ag_gemm {what}: {error}"
        if scattered is not None:
            want = sum(x[self.mine].double() @ w.double().T for x, w in zip(self.parts, self.weights, strict=True))
            assert scattered.shape == want.shape
            error = reference.relative_error(scattered, want)
            assert error <= BUDGET, f"gemm_rs {what}: {error}"


DENSE_SIZES = [(0, 72, 264), (1, 8, 8), (333, 264, 520), (64, 64, 256), (65, 1024, 72), (129, 200, 8), (1000, 520, 1000),
               (2048, 1024, 2048)]


@both
def dense(ranks: Ranks) -> None:
    """ag_gemm and gemm_rs against float64 with poisoned memory, bitwise equal when repeated; no tail is a tile (KRN-13, KRN-14)."""
    for sizes in (*DENSE_SIZES, *DENSE_SIZES[2:0:-1]):
        operands = Dense(ranks, *sizes)
        results = []
        for _ in range(2):
            poison(ranks)
            results.append((operands.gather(), operands.scatter()))
            ops.synchronize(ranks.group)
        operands.check(*results[0], sizes)
        assert all(torch.equal(*pair) for pair in zip(*results, strict=True)), f"{sizes}: not bitwise equal when repeated"


def dense_back_to_back(ranks: Ranks) -> None:
    """Calls without a wait between them, whose rows rise and fall under the same workspace."""
    choose = random.Random(3)
    cases = [Dense(ranks, tokens, 520, 264, seed) for seed, tokens in enumerate((1024, 1, 700, 64, 0, 333))]
    for step in range(400):
        case = choose.choice(cases)
        gathered, scattered = case.gather(), case.scatter()
        if step % 20 == 0:
            case.check(gathered, scattered, step)
    ops.synchronize(ranks.group)


@dataclass(frozen=True)
class Routed:
    """One call of the routed ops and its reference."""

    ranks: Ranks
    data: Data
    case: Case
    weighted: bool

    @property
    def options(self) -> dict:
        case = self.case
        return dict(num_experts=case.experts, mode=case.mode, tokens_per_rank=case.max_tokens, group=self.ranks.group)

    def weights(self) -> tuple[torch.Tensor, torch.Tensor]:
        return shard_weights(self.data.w13, self.data.w2, mode=self.case.mode, world=self.ranks.world, rank=self.ranks.rank)

    def dispatch(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        x, ids, weights = self.data.mine()
        return ops.dispatch_gemm(x, ids, self.weights()[0], topk_weights=weights if self.weighted else None, **self.options)

    def combine(self, activated: torch.Tensor) -> torch.Tensor:
        _, ids, weights = self.data.mine()
        return ops.gemm_combine(activated, ids, self.weights()[1], topk_weights=None if self.weighted else weights, **self.options)

    def mega(self) -> torch.Tensor:
        return ops.mega_moe(*self.data.mine(), *self.weights(), weight_position="before_l2" if self.weighted else "combine",
                            **self.options)

    def check_dispatch(self, activated: torch.Tensor, offsets: torch.Tensor, slots: torch.Tensor) -> None:
        case, world, rank = self.case, self.ranks.world, self.ranks.rank
        row_block = functional.routed_row_block(True, world=world, tokens_per_rank=case.max_tokens, top_k=case.top_k,
                                                num_experts=case.experts)
        counts = [case.count(r) for r in range(world)]
        tables = build_tables(self.data.ids[:world * case.max_tokens], token_counts=counts, world=world, rank=rank,
                              num_experts=case.experts, mode=case.mode, row_block=row_block)
        assert torch.equal(offsets.cpu(), tables.expert_offsets) and torch.equal(slots.cpu(), tables.slots), case
        rows = functional.routed_rows(world=world, rank=rank, tokens_per_rank=case.max_tokens, top_k=case.top_k,
                                      num_experts=case.experts, mode=case.mode, row_block=row_block)
        want = torch.zeros(rows, activated.shape[1], dtype=torch.float64, device=activated.device)
        w13 = self.weights()[0].double()
        bounds, pairs = tables.expert_offsets.tolist(), tables.slot_pair.to(activated.device)
        for expert in range(w13.shape[0]):
            first, last = bounds[expert], bounds[expert + 1]
            pair = pairs[first:last]
            real = pair >= 0
            x = self.data.x[(pair[real] // case.top_k).long()].double() @ w13[expert].T
            act = reference.activate(*x.chunk(2, 1))
            if self.weighted:
                act *= self.data.weights.to(x.device).reshape(-1)[pair[real].long()].double()[:, None]
            want[first:last][real] = act
        assert activated.shape == want.shape, (case, activated.shape, want.shape)
        empty = (want == 0).all(1)
        assert bool((activated[empty] == 0).all()), f"{case}: rows of no pair are not zero"
        error = reference.relative_error(activated, want)
        assert error <= BUDGET, f"dispatch_gemm {case}: {error}"


ROUTED_CASES = [
    Case(64, 2, 8, (64,), "ep", hidden=256, inter=128), Case(333, 8, 16, (333, 200), "ep", routing="zipf", hidden=512, inter=264),
    Case(333, 8, 16, (0, 333), "ep", hidden=520, inter=72), Case(333, 4, 16, (300, 333), "tp", None, None, "hot_expert", 264, 208),
    Case(1, 1, 1, (1,), "ep", hidden=1536, inter=72), Case(1024, 4, 8, (1024, 1), "ep", hidden=1024, inter=768),
    Case(1024, 4, 6, (1024, 900), "tp", hidden=1024, inter=400), Case(64, 2, 3, (0,), "ep", hidden=64, inter=16)]


@both
def routed(ranks: Ranks) -> None:
    """dispatch_gemm, gemm_combine and mega_moe against the schedule and float64, with poisoned memory, twice."""
    for case in ROUTED_CASES:
        data = Data(case, ranks)
        want = None
        for weighted in (True, False):
            call = Routed(ranks, data, case, weighted)
            results = []
            for _ in range(2):
                poison(ranks)
                dispatched = call.dispatch()
                results.append((*dispatched, call.combine(dispatched[0]), call.mega()))
                ops.synchronize(ranks.group)
            call.check_dispatch(*results[0][:3])
            args = data.mine()
            want = reference.moe_layer(*args, data.w13, data.w2) if want is None else want
            for name, out in zip(("gemm_combine", "mega_moe"), results[0][3:], strict=True):
                error = reference.relative_error(out, want)
                assert error <= BUDGET, f"{name} {case} weighted {weighted}: {error}"
            assert all(torch.equal(*pair) for pair in zip(*results, strict=True)), f"{case}: not bitwise equal when repeated"


ROUTED_SMALL = Case(256, 4, 32, (256, 100), hidden=512, inter=256)


def routed_back_to_back(ranks: Ranks) -> None:
    """dispatch_gemm after dispatch_gemm without a wait and with changing rows: exported rows are not overwritten while a rank still
    reads them, though nobody owes a partial row."""
    cases = [Routed(ranks, Data(ROUTED_SMALL, ranks, seed), ROUTED_SMALL, True) for seed in range(3)]
    expected = [case.dispatch()[0].clone() for case in cases]
    ops.synchronize(ranks.group)
    for case, activated in zip(cases, expected, strict=True):
        case.check_dispatch(activated, *case.dispatch()[1:])
    wrong = torch.zeros((), dtype=torch.int64, device=ranks.device)
    for step in range(600):
        if step % 97 == 5 * ranks.rank:
            torch.cuda._sleep(3_000_000)
        wrong += (cases[step % 3].dispatch()[0] != expected[step % 3]).any()
    ops.synchronize(ranks.group)
    assert int(wrong) == 0


def graphs(ranks: Ranks) -> None:
    """All ops in one CUDA graph, captured after a first call of their sizes, replayed with new data (GRF)."""
    dense_case = Dense(ranks, 200, 264, 520)
    case = Routed(ranks, Data(ROUTED_SMALL, ranks), ROUTED_SMALL, True)
    x, ids, weights = case.data.mine()
    w13, w2 = case.weights()

    def step() -> tuple[torch.Tensor, ...]:
        gathered, scattered = dense_case.gather(), dense_case.scatter()
        activated, offsets, slots = ops.dispatch_gemm(x, ids, w13, topk_weights=weights, **case.options)
        combined = ops.gemm_combine(activated, ids, w2, **case.options)
        return gathered, scattered, activated, offsets, slots, combined, ops.mega_moe(x, ids, weights, w13, w2, **case.options)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.Stream(), capture_error_mode="thread_local"):
        captured = step()
    for seed in range(4):
        dense_case.x.copy_(draw(seed, *dense_case.x.shape, device=ranks.device))
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed)).to(ranks.device)
        for tensor in (x, ids, weights):
            tensor.copy_(tensor[order])
        for tensor in captured:
            tensor.fill_(float("nan") if tensor.is_floating_point() else -7)
        graph.replay()
        eager = step()
        ops.synchronize(ranks.group)
        assert all(torch.equal(*pair) for pair in zip(captured, eager, strict=True)), f"replay {seed}"
        dense_case.check(captured[0], captured[1], "graph")
    unknown = Dense(ranks, 3, 4096, 8)
    with pytest.raises(MoETkError, match="make one call of this size before the capture"):
        with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=torch.cuda.Stream(), capture_error_mode="thread_local"):
            unknown.gather()


def refusals(ranks: Ranks) -> None:
    """Bad arguments on one rank and calls that differ are computed by none: NaN, an error on each rank, all go on (KRN-07)."""
    good = Dense(ranks, 60, 64, 72)
    good.check(good.gather(), good.scatter(), "before")
    if ranks.rank == 0:
        with pytest.raises(ArgumentTypeError, match="weight has dtype float32, wanted bfloat16"):
            ops.ag_gemm(good.x[good.mine], good.weight.float())
        ops.synchronize()
    else:
        out = good.gather()
        with pytest.raises(PeerRefused, match="rank 0 refused"):
            ops.synchronize()
        assert out.isnan().all()
    uneven = 50 + ranks.rank
    routing = make_routing("uniform", num_tokens=uneven, num_experts=4, top_k=2, seed=0)
    ids, w13 = routing.topk_ids.to(ranks.device), draw(5, 4 // ranks.world, 32, 64, device=ranks.device)
    warm = draw(6, 64, 64, device=ranks.device)
    ops.dispatch_gemm(warm, torch.zeros(64, 2, dtype=torch.int32, device=ranks.device), w13, num_experts=4)
    for call in (lambda: ops.ag_gemm(good.x[:uneven], good.weight), lambda: ops.gemm_rs(good.parts[ranks.rank][:2 * uneven],
                                                                                       good.weights[ranks.rank]),
                 lambda: ops.dispatch_gemm(warm[:uneven], ids, w13, num_experts=4)[0]):
        out = call()
        with pytest.raises(MoETkError, match="ranks disagreed"):
            ops.synchronize()
        assert out.isnan().all()
    with pytest.raises(ArgumentTypeError, match="weight has dtype float32"):  # on all ranks: none hears of the others
        ops.ag_gemm(good.x[good.mine], good.weight.float())
    good.check(good.gather(), good.scatter(), "after")
    ops.synchronize()


def missing_rank(ranks: Ranks) -> None:
    """A rank that makes no call: the other raises ProtocolTimeout with its name, also through another op, until the memory is
    released on all ranks (KRN-09)."""
    good = Dense(ranks, 60, 64, 72)
    good.check(good.gather(), good.scatter(), "before")
    ranks.meet()
    if ranks.rank == 0:
        begin = time.monotonic()
        out = ops.ag_gemm(good.x[good.mine], good.weight, timeout_s=1.0)
        with pytest.raises(ProtocolTimeout, match="missing rank 1.*phase exchange"):
            ops.synchronize()
        assert 0.9 < time.monotonic() - begin < 3 and out.isnan().all()
        with pytest.raises(MoETkError, match="release_ops_memory"):
            good.scatter()
    ranks.meet()
    if ranks.rank == 1:  # told by rank 0
        with pytest.raises(ProtocolTimeout):
            good.gather()
            ops.synchronize()
    ranks.meet()
    ops.release_ops_memory()
    assert not cuda_sessions._held
    good.check(good.gather(), good.scatter(), "after")


def told_rank(ranks: Ranks) -> None:
    """A rank that comes to a call which the other one has given up, and needs nothing of it: no wait of its own fails, yet its
    result is NaN and it raises."""
    x, w13 = draw(1 + ranks.rank, 64, 64, device=ranks.device), draw(5, 1, 32, 64, device=ranks.device)
    ids = torch.full((64, 1), ranks.rank, dtype=torch.int32, device=ranks.device)  # the expert of this rank

    def call(timeout_s: float) -> tuple[torch.Tensor, ...]:
        return ops.dispatch_gemm(x, ids, w13, num_experts=ranks.world, timeout_s=timeout_s)

    assert bool(call(5.0)[0][:64].isfinite().all())
    ops.synchronize()
    for late in (False, True):
        ranks.meet()
        if ranks.rank == int(late):
            activated, _, slots = call(5.0 if late else 1.0)
            with pytest.raises(ProtocolTimeout, match="missing rank 1"):
                ops.synchronize()
            assert bool(activated.isnan().all()) and bool((slots == -1).all())
    ranks.meet()
    ops.release_ops_memory()


def torch_ops(ranks: Ranks) -> None:
    """opcheck of every op on CUDA tensors, fake shapes, and a compiled function with a layer and ops in it (OPS-01)."""
    device = ranks.device
    x, ids, weights = draw(1, 9, 16, device=device), torch.randint(-1, 7, (9, 2), device=device), torch.rand(9, 2, device=device)
    w13, w2 = draw(2, 6, 16, 16, device=device), draw(3, 6, 16, 8, device=device)
    rows = functional.routed_rows(world=1, rank=0, tokens_per_rank=9, top_k=2, num_experts=6, mode="ep", row_block=64)
    samples = {
        "ag_gemm": (x, draw(4, 24, 16, device=device), "single", None),
        "gemm_rs": (x, draw(5, 8, 16, device=device), "single", None),
        "dispatch_gemm": (x, ids, weights, w13, 6, "ep", None, "swiglu", None, "single", None),
        "gemm_combine": (draw(6, rows, 8, device=device), ids, None, w2, 6, "tp", None, "single", None),
        "mega_moe": (x, ids, weights, w13, w2, 6, "ep", "gpt_oss", 3.0, "combine", "single", None, None)}
    for name, arguments in samples.items():
        results = opcheck(getattr(torch.ops.moe_tk, name).default, arguments)
        assert set(results.values()) == {"SUCCESS"}, (name, results)
    case = Case(64, 2, 8, (33,), hidden=64, inter=32)
    data = Data(case, ranks)
    layer = case.layer(ranks)
    data.load(layer)
    args = data.mine()
    weight, name = draw(7, 24, 64, device=device), ranks.group.name

    def steps(x, ids, weights):
        out = torch.full_like(x, float("nan"))
        layer(x * 2, ids, weights, out=out)
        return torch.ops.moe_tk.ag_gemm(out, weight, name) + 1

    compiled = torch.compile(steps, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*args), steps(*args))
    layer.synchronize()
    ops.synchronize()
    assert isinstance(layer, moe_tk.MoELayer)
    torch.compiler.reset()  # what was compiled holds the layer
