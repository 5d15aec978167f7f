"""What the ranks do in the tests of the CUDA back end. Each function runs on every rank and asserts."""

from __future__ import annotations

import os
import random
import signal
import time
from dataclasses import dataclass, field

import pytest
import torch

import moe_tk
from moe_tk import reference
from moe_tk.errors import ArgumentError, MoETkError, PeerLost, PeerRefused, ProtocolTimeout
from moe_tk.group import resolve_group
from moe_tk.planner import FUSED_VARIANTS
from moe_tk.runtime.nvlink_layer import DEFAULT_PASSES
from moe_tk.runtime.nvlink_session import OPEN
from moe_tk.schedule import build_tables, make_routing, task_order
from moe_tk.weights import shard_weights


@dataclass
class Ranks:
    """Where a check runs."""

    rank: int
    world: int
    device: torch.device
    group: object = field(default=None)
    pattern: str = "two_kernel"  # of the layers that the checks make

    def __post_init__(self) -> None:
        self.group = resolve_group(None)

    def meet(self) -> None:
        torch.cuda.synchronize()
        self.group.gather(None, timeout_s=60, step="test: meet")


@dataclass(frozen=True)
class Case:
    """A layer and the tokens of every rank (the last entry holds for all further ranks)."""

    max_tokens: int
    top_k: int
    experts: int
    counts: tuple[int, ...]
    mode: str = "ep"
    row_block: int | None = None
    segments: int | None = None
    routing: str = "uniform"
    hidden: int = 64
    inter: int = 32
    weight_position: str = "before_l2"

    def count(self, rank: int) -> int:
        return self.counts[min(rank, len(self.counts) - 1)]

    def layer(self, ranks: Ranks, **options):
        return moe_tk.MoELayer(ranks.group, num_experts=self.experts, top_k=self.top_k, hidden_size=self.hidden,
                               intermediate_size=self.inter, max_tokens_per_rank=self.max_tokens, mode=self.mode, protocol="nvlink",
                               row_block=self.row_block, segments=self.segments, weight_position=self.weight_position,
                               device=ranks.device, **{"timeout_s": 5.0, "pattern": ranks.pattern, **options})


class Data:
    """Weights, tokens and routing of all ranks, the same on every rank; `mine` are the tensors of one rank."""

    def __init__(self, case: Case, ranks: Ranks, seed: int = 0) -> None:
        self.case, self.ranks = case, ranks
        generator = torch.Generator(device=ranks.device).manual_seed(1234 + seed)

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, device=ranks.device, generator=generator)

        self.w13 = (draw(case.experts, 2 * case.inter, case.hidden) / case.hidden**0.5).bfloat16()
        self.w2 = (draw(case.experts, case.hidden, case.inter) / case.inter**0.5).bfloat16()
        self.x = draw(ranks.world * case.max_tokens, case.hidden).bfloat16()
        routing = make_routing(case.routing, num_tokens=ranks.world * case.max_tokens, num_experts=case.experts, top_k=case.top_k,
                               seed=seed)
        self.ids, self.weights = routing.topk_ids.to(torch.int64).clone(), routing.topk_weights.float().clone()
        if case.experts > 3:  # skipped pairs, skipped rows, an expert twice
            self.ids[1::7, 0] = -1
            self.ids[2::11] = case.experts + 5
            self.ids[3::13, -1] = self.ids[3::13, 0]

    def mine(self, count: int | None = None, first: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        count = self.case.count(self.ranks.rank) if count is None else count
        rows = slice(self.ranks.rank * self.case.max_tokens + first, self.ranks.rank * self.case.max_tokens + first + count)
        return self.x[rows].contiguous(), self.ids[rows].to(self.ranks.device), self.weights[rows].to(self.ranks.device)

    def load(self, layer) -> None:
        layer.load_weights(*shard_weights(self.w13, self.w2, mode=self.case.mode, world=self.ranks.world, rank=self.ranks.rank))

    def error(self, out: torch.Tensor, args: tuple[torch.Tensor, ...]) -> float:
        return reference.relative_error(out, reference.moe_layer(*args, self.w13, self.w2))


def poisoned_call(layer, ranks: Ranks, args: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """The result of a call with poisoned buffers."""
    ranks.meet()
    layer.session.workspace.poison()
    ranks.meet()
    out = torch.full_like(args[0], float("nan"))
    layer(*args, out=out)
    layer.synchronize()
    return out


BUDGET = reference.ERROR_BUDGET[torch.bfloat16]

TABLE_CASES = [
    Case(64, 2, 8, (64,), row_block=64, segments=1),
    Case(333, 8, 64, (333, 200), row_block=128, segments=3, hidden=2184, inter=392),
    Case(333, 8, 64, (0, 333), row_block=64, segments=2, routing="zipf", hidden=1160, inter=200),
    Case(333, 8, 64, (0,), "tp", 64, 2), Case(512, 8, 64, (512,), "tp", 128, 1, hidden=1416, inter=392),
    Case(512, 8, 64, (511, 1), "tp", 64, 4, "hot_expert"), Case(512, 6, 30, (500, 77), row_block=128, segments=4, hidden=2184),
    Case(512, 6, 30, (500, 77), row_block=64, routing="all_invalid"), Case(2048, 8, 128, (2048,), row_block=128, segments=4),
    Case(8192, 8, 64, (8192,), row_block=128, segments=4, routing="zipf"), Case(8192, 8, 256, (8192, 8000), "tp", 64, 4),
    Case(100, 1, 1, (100, 3), row_block=128, segments=4),
    Case(512, 8, 64, (512,), row_block=64, segments=2, routing="hot_rank"), Case(96, 32, 1024, (96, 40), "tp", 64, 1)]


def compare_tables(workspace, want, count: int, layer, columns: tuple[int, int], passes: int) -> list[str]:
    """Names of the tables on the device that differ from the schedule's. columns: of the tiles of both GEMMs; passes: of GEMM 2."""
    slots, blocks, jobs = want.slot_pair.numel(), want.block_group.numel(), want.job_order.numel()
    present = torch.cat([torch.arange(want.tokens_per_rank) < c for c in want.token_counts.tolist()])
    widths = 2 * layer.session.geometry.padded_intermediate, layer.hidden_size
    orders = [task_order(want, -(-width // tile), times, 256 // tile)
              for width, tile, times in zip(widths, columns, (1, passes), strict=True)]
    pairs = {
        "counts": (workspace.local("counts"), torch.tensor([slots, blocks, jobs, *(len(order) for order in orders)])),
        "expert_offsets": (workspace.local("expert_offsets")[:want.expert_offsets.numel()], want.expert_offsets),
        "slots": (workspace.local("slots").cpu()[present], want.slots[present]),
        "slot_pair": (workspace.local("slot_pair")[:slots], want.slot_pair),
        "block_target": (workspace.local("block_target")[:blocks], want.block_target),
        "block_group": (workspace.local("block_group")[:blocks], want.block_group),
        "job_order": (workspace.local("job_order")[:jobs], want.job_order),
        "chunk_expected": (workspace.local("chunk_expected"), want.chunk_expected),
        "expert_load": (workspace.local("expert_load")[:want.expert_load.numel()], want.expert_load),
        "contributors": (workspace.local("contributors", torch.int64)[:count], want.contributors[:count]),
        "token_counts": (workspace.local("token_counts"), want.token_counts),
        "tasks1": (workspace.local("tasks1")[:len(orders[0])], orders[0]),
        "tasks2": (workspace.local("tasks2")[:len(orders[1])], orders[1])}
    return [name for name, (got, expected) in pairs.items() if not torch.equal(got.cpu().long(), expected.long())]


def check_tables(layer, data: Data, row_block: int, columns: tuple[int, int], passes: int, what: str):
    """The first launch of a call builds the schedule's tables, element by element. Returns those."""
    case, ranks = data.case, data.ranks
    x, ids, weights = data.mine()
    layer._calls.forward(x, ids, weights, torch.empty_like(x), signature=7, stages=OPEN)
    layer.synchronize()
    counts, segments = [case.count(rank) for rank in range(ranks.world)], layer._calls.choices(len(x))[1]
    want = build_tables(data.ids, token_counts=counts, world=ranks.world, rank=ranks.rank, num_experts=case.experts,
                        mode=case.mode, row_block=row_block, segments=segments, job_chunk=32)
    different = compare_tables(layer.session.workspace, want, len(x), layer, columns, passes)
    assert different == [], f"{case} {what}"
    weight = layer.session.workspace.local("slot_weight", torch.float32)[:want.slot_pair.numel()].cpu()
    real = want.slot_pair >= 0
    assert torch.equal(weight[real], data.weights.reshape(-1)[want.slot_pair[real].long()]), f"{case} {what}: slot_weight"
    return want


def sent_rows_are_there(workspace, want, data: Data, case: Case, ranks: Ranks) -> bool:
    """Whether each row that this rank wants of another one has been written here."""
    ranks.meet()  # nobody waits for rows in the first launch
    arrived = workspace.region("rows", torch.bfloat16).view(ranks.world - 1, case.max_tokens, case.hidden)
    wanted = want.delivery_order.long()
    source, token = wanted // case.max_tokens, wanted % case.max_tokens
    there = source != ranks.rank
    place = (source - (source > ranks.rank).long())[there].to(ranks.device)
    return torch.equal(arrived[place, token[there].to(ranks.device)], data.x[wanted[there].to(ranks.device)])


def tables(ranks: Ranks) -> None:
    """The tables that open_call builds equal the schedule's, element by element; routing weights and rows have arrived."""
    variants = FUSED_VARIANTS["bfloat16"]
    for index, case in enumerate(TABLE_CASES):
        layer = case.layer(ranks)
        for seed in range(2):  # with the tiles that the call takes; then with any, in two passes
            layer._calls.variant, layer._calls.passes = (None, None) if seed == 0 else (variants[index % len(variants)].name, 2)
            data = Data(case, ranks, seed)
            data.load(layer)
            variant, passes = layer._calls.variant_of(case.count(ranks.rank)), layer._calls.passes or DEFAULT_PASSES
            want = check_tables(layer, data, variant.row_block, (variant.gather_cols, variant.scatter_cols), passes,
                                f"{variant.name} seed {seed}")
            if ranks.world > 1:
                there = sent_rows_are_there(layer.session.workspace, want, data, case, ranks)
                ranks.meet()  # only a whole call keeps the next one's rows away until these have been read
                assert there, f"{case}: rows from the other ranks"


LAYER_CASES = [
    Case(64, 2, 8, (64,), "ep", 64, 1, hidden=256, inter=128),
    Case(64, 2, 8, (64,), "tp", 128, 1, hidden=256, inter=128, weight_position="combine"),
    Case(333, 8, 64, (333, 200), "ep", 128, 3, "zipf", hidden=512, inter=256),
    Case(333, 8, 64, (0, 333), "ep", 64, 2, hidden=520, inter=264, weight_position="combine"),
    Case(333, 8, 16, (300, 333), "tp", 128, 2, "hot_expert", hidden=1024, inter=200),
    Case(333, 8, 16, (300, 333), "tp", None, None, hidden=264, inter=202),
    Case(512, 6, 30, (500, 77), "ep", 128, 1, hidden=7168, inter=512),
    Case(512, 2, 3, (0,), "ep", 128, 1, hidden=1536, inter=72),
    Case(512, 1, 1, (512, 7), "ep", 64, 1, hidden=1536, inter=72),
    Case(512, 4, 32, (512,), "ep", None, None, "hot_rank", hidden=1024, inter=256),
    Case(2048, 8, 64, (2048,), "ep", 128, 2, hidden=2048, inter=768),
    Case(2048, 8, 64, (2048, 1000), "tp", 128, 4, hidden=2048, inter=768)]


def layer_against_reference(ranks: Ranks, **settings: object) -> None:
    """The layer against float64, for every routing with poisoned buffers, bitwise equal when repeated; settings: of its calls."""
    for case in LAYER_CASES:
        layer = case.layer(ranks)
        for name, value in settings.items():
            setattr(layer._calls, name, value)
        for seed in range(2):
            data = Data(case, ranks, seed)
            data.load(layer)
            x, ids, weights = data.mine()
            ids = ids.to(torch.int32) if seed else ids
            outputs = [poisoned_call(layer, ranks, (x, ids, weights)) for _ in range(2)]
            error = data.error(outputs[0], (x, ids, weights))
            assert error <= BUDGET, f"{case} seed {seed}: {error}"
            assert torch.equal(*outputs), f"{case} seed {seed}: not bitwise equal when repeated"
            if seed == 0:
                first = data.error(layer(x, ids, weights.bfloat16()), (x, ids, weights.bfloat16()))
                assert first <= BUDGET, f"{case}: bfloat16 routing weights"
        assert layer.memory.total == layer.session.workspace.allocated_bytes


def two_passes(ranks: Ranks) -> None:
    """The same with GEMM 2 in two passes over its columns, and rows sent by few blocks."""
    layer_against_reference(ranks, passes=2, export_blocks=8)


SMALL = Case(512, 4, 32, (512,), hidden=1024, inter=256)


def back_to_back(ranks: Ranks) -> None:
    """5000 calls without waiting, with changing T and routing: epochs, counters and the two routing buffers hold (KRN-04)."""
    data = Data(SMALL, ranks)
    layer = SMALL.layer(ranks)
    data.load(layer)
    sizes = (0, 1, 7, 100, 512)
    for call in range(5000):
        count = sizes[(call * 7 + ranks.rank * 3 * (call // 5)) % 5]
        args = data.mine(count, first=(call * 13) % (513 - count))
        out = layer(*args)
        if call % 101 == 0:  # no multiple of 5: results of all sizes are looked at
            layer.synchronize()
            assert data.error(out, args) <= BUDGET, f"call {call} with {count} tokens"
    layer.synchronize()


def graphs(ranks: Ranks) -> None:
    """Graphs captured at three sizes on another stream, replayed in random order with new data between eager calls (GRF)."""
    data = Data(SMALL, ranks)
    layer = SMALL.layer(ranks)
    data.load(layer)
    captured = {}
    for count in (8, 200, 512):
        buffers = [*data.mine(count), torch.empty(count, SMALL.hidden, device=ranks.device, dtype=torch.bfloat16)]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.Stream(), capture_error_mode="thread_local"):
            layer(*buffers[:3], out=buffers[3])
        captured[count] = (graph, buffers)
    choose = random.Random(5)
    for step in range(100):
        kind, count = choose.choice((8, 200, 512, 0)), 333
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
        assert data.error(out, (x[:count], ids[:count], weights[:count])) <= BUDGET, f"step {step}, graph {kind}"


def streams_and_devices(ranks: Ranks) -> None:
    """A stream that is not the default one, a current device that is not the tensors' (SYM-04), a group that is not WORLD."""
    import torch.distributed as dist

    data = Data(SMALL, ranks)
    subgroup = dist.new_group(list(range(ranks.world)), backend="cpu:gloo,cuda:nccl")
    layer = SMALL.layer(Ranks(ranks.rank, ranks.world, ranks.device), reserve_sms=8)
    other = moe_tk.MoELayer(subgroup, num_experts=32, top_k=4, hidden_size=1024, intermediate_size=256, max_tokens_per_rank=512,
                            protocol="nvlink", device=ranks.device)
    assert other.session is not layer.session
    for each in (layer, other):
        data.load(each)
        args = data.mine()
        torch.cuda.synchronize()
        with torch.cuda.device((ranks.device.index + 1) % torch.cuda.device_count()):
            plain = each(*args)
        with torch.cuda.stream(torch.cuda.Stream(ranks.device)):
            out = each(*args)
            each.synchronize()
        torch.cuda.synchronize()
        assert data.error(plain, args) <= BUDGET and torch.equal(plain, out)
        expected = build_tables(data.ids, token_counts=[512] * ranks.world, world=ranks.world, rank=ranks.rank, num_experts=32,
                                mode="ep", row_block=64).expert_load
        assert torch.equal(each.expert_load.cpu(), 2 * expected.long())


def refusals(ranks: Ranks) -> None:
    """An argument error on one rank is told to the others, nothing is computed, and all may go on (SAFE)."""
    data = Data(SMALL, ranks)
    layer = SMALL.layer(ranks)
    data.load(layer)
    args = data.mine()
    if ranks.rank == 0:
        with pytest.raises(ArgumentError, match="topk_ids has shape"):
            layer(args[0], args[1][:, :2], args[2])
        layer.synchronize()
    else:
        out = layer(*args)
        with pytest.raises(PeerRefused, match="rank 0 refused"):
            layer.synchronize()
        assert out.isnan().all()
    out = layer(*args)
    layer.synchronize()
    assert data.error(out, args) <= BUDGET
    second = SMALL.layer(ranks)
    data.load(second)
    assert second.session is layer.session
    first_called = layer if ranks.rank == 0 else second
    first_called(*args)
    with pytest.raises(MoETkError, match="ranks disagreed"):
        first_called.synchronize()
    out = second(*args)
    second.synchronize()
    assert data.error(out, args) <= BUDGET


def late_rank(ranks: Ranks) -> None:
    """A rank that comes late, on the host or on its stream, changes nothing."""
    data = Data(SMALL, ranks)
    layer = SMALL.layer(ranks)
    data.load(layer)
    args = data.mine()
    for step in range(4):
        if ranks.rank == step % ranks.world:
            time.sleep(0.3)
            torch.cuda._sleep(200_000_000)
        layer.session.workspace.local("slot_rows", torch.bfloat16).fill_(float("nan"))
        out = layer(*args)
        layer.synchronize()
        assert data.error(out, args) <= BUDGET


def missing_rank(ranks: Ranks) -> None:
    """A rank that makes no call: the other one raises ProtocolTimeout with its name, and its GPU works on (KRN-09)."""
    data = Data(SMALL, ranks)
    layer = SMALL.layer(ranks, timeout_s=1.0)
    data.load(layer)
    args = data.mine()
    ranks.meet()
    if ranks.rank == 0:
        begin = time.monotonic()
        out = layer(*args)
        with pytest.raises(ProtocolTimeout, match="missing rank 1.*phase exchange"):
            layer.synchronize()
        assert 0.9 < time.monotonic() - begin < 3
        assert out.isnan().all()
        with pytest.raises(MoETkError, match="unusable"):
            layer(*args)
        assert torch.ones(1000, device=ranks.device).sum().item() == 1000
    ranks.meet()
    if ranks.rank == 1:  # told by rank 0
        layer(*args)
        with pytest.raises(ProtocolTimeout):
            layer.synchronize()
    ranks.meet()
    fresh = SMALL.layer(ranks)
    data.load(fresh)
    out = fresh(*args)
    fresh.synchronize()
    assert data.error(out, args) <= BUDGET


def dead_rank(ranks: Ranks) -> None:
    """A killed process: the other rank raises PeerLost within a second, its context works on (KRN-11)."""
    data = Data(SMALL, ranks)
    layer = SMALL.layer(ranks, timeout_s=30.0)
    data.load(layer)
    args = data.mine()
    layer(*args)
    layer.synchronize()
    ranks.meet()
    if ranks.rank == 1:
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    out = layer(*args)
    begin = time.monotonic()
    with pytest.raises(PeerLost, match="rank 1 died"):
        layer.synchronize()
    assert time.monotonic() - begin < 0.5 + 1.0
    assert out.isnan().all()
    assert torch.ones(1000, device=ranks.device).sum().item() == 1000
    print("survived")
