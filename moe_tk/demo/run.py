"""What a rank does: makes the layers, calls them in turn, checks every call and hands back a record."""

from __future__ import annotations

import hashlib
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from moe_tk import reference
from moe_tk.config import env
from moe_tk.demo.bench_gpu import GpuBench, worst
from moe_tk.demo.input import LayerInput, cut, load_input, padded_ids
from moe_tk.demo.options import MIN_CALLS, Options
from moe_tk.demo.records import Failure, ModeRecord, PatternRecord, RankRecord
from moe_tk.layer import MoELayer
from moe_tk.runtime.host import host_module
from moe_tk.schedule import build_tables, expert_range, readiness, shard_range
from moe_tk.weights import shard_weights

Say = Callable[[str, int], None]  # (stage, calls done since the last one)
DTYPE = torch.bfloat16
CALL_LIMIT_S = 60.0  # ranks share their cores with whatever else runs here; one that dies is noticed at once anyway


def rank_main(rank: int, world: int, options: Options, say_to: object = None) -> RankRecord | Failure:
    """measure(), with an exception turned into a Failure. say_to: a connection for progress; only rank 0 speaks."""
    def say(stage: str, done: int) -> None:
        if rank == 0 and say_to is not None:
            say_to.send((stage, done))

    return guarded(rank, world, options, say)


def guarded(rank: int, world: int, options: Options, say: Say) -> RankRecord | Failure:
    """measure(), with an exception turned into a Failure."""
    try:
        return measure(rank, world, options, say)
    except Exception as error:
        return Failure(rank, time.monotonic(), f"{type(error).__name__}: {error}", traceback.format_exc())


def measure(rank: int, world: int, options: Options, say: Say) -> RankRecord:
    """Runs every mode and pattern on this rank's piece of the input. A collective of the default group."""
    on_gpus = options.backend == "cuda"
    torch.set_num_threads(1)
    if not on_gpus:
        host_module()  # where it must be built first, nothing is timed or shown yet
    say("float64 reference", 0)
    whole = load_input(options.tokens)
    counts = cut(options.tokens, world, uneven=options.uneven)
    mine = whole.rows(sum(counts[:rank]), counts[rank])
    want = reference.moe_layer(mine.hidden, mine.ids, mine.weights, mine.w13, mine.w2)
    modes = {mode: _measure_mode(mode, rank, counts, whole, mine, want, options, say) for mode in options.modes}
    return RankRecord(
        rank=rank, tokens=counts[rank], sizes=whole.sizes, dtype=str(DTYPE).removeprefix("torch."),
        budget=reference.ERROR_BUDGET[DTYPE], reference_error_squared=_squared(want - mine.shipped.double()),
        shipped_squared=_squared(mine.shipped), modes=modes, gpu=torch.cuda.get_device_name() if on_gpus else None)


def _measure_mode(mode: str, rank: int, counts: list[int], whole: LayerInput, mine: LayerInput, want: Tensor, options: Options,
                  say: Say) -> ModeRecord:
    world, on_gpus = len(counts), options.backend == "cuda"
    w13, w2 = shard_weights(whole.w13, whole.w2, mode=mode, world=world, rank=rank)
    benches = {}
    for pattern in options.patterns:
        layer = MoELayer(None, **whole.sizes, max_tokens_per_rank=max(1, *counts), mode=mode, pattern=pattern, dtype=DTYPE,
                         protocol="nvlink" if on_gpus else "auto", timeout_s=max(CALL_LIMIT_S, env("MOE_TK_TIMEOUT_S")))
        if on_gpus:
            w13, w2 = w13.to(layer.device), w2.to(layer.device)
        layer.load_weights(w13, w2)
        benches[pattern] = (GpuBench if on_gpus else _Bench)(layer, mine, want)
    layer = benches[options.patterns[-1]].layer
    _call_all(mode, list(benches.values()), options, say)
    return ModeRecord(
        patterns={pattern: bench.record() for pattern, bench in benches.items()},
        readiness=_readiness(layer, whole, counts), plan=layer.plan.explain(),
        starting_roles=[] if on_gpus else _starting_roles(layer),
        experts=(0, whole.w13.shape[0]) if mode == "tp" else expert_range(whole.w13.shape[0], world, rank),
        columns=shard_range(whole.w2.shape[2], world, rank)[1] if mode == "tp" else whole.w2.shape[2])


def _call_all(mode: str, benches: list[_Bench] | list[GpuBench], options: Options, say: Say) -> None:
    """All calls. The patterns take turns, so that whatever else the machine does falls on all of them alike."""
    def each(kind: str) -> None:
        say(f"{mode.upper()}: {kind} calls", 0)
        for bench in benches:
            bench.call(kind)
            say("", 1)

    group, begin = benches[0].layer.group, time.monotonic()
    each("warm-up")
    for number in range(1, options.calls + 1):
        each("timed")
        if options.timed_limit_s is not None and number >= MIN_CALLS:
            late = time.monotonic() - begin > options.timed_limit_s
            if group.gather(late, timeout_s=CALL_LIMIT_S, step="demo: go on?")[0]:  # rank 0's clock decides for all
                say("", (options.calls - number) * len(benches))
                break
    if options.backend == "cpu":
        each("traced")
    else:
        say("", len(benches))


@dataclass
class _Bench:
    """One layer and what its calls gave."""

    layer: MoELayer
    mine: LayerInput
    want: Tensor
    errors: list[float] = field(default_factory=list)
    shipped_errors: list[float] = field(default_factory=list)
    digests: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    waits: list[dict[str, float]] = field(default_factory=list)
    busies: list[dict[str, float]] = field(default_factory=list)
    traced_ns: tuple[int, int] = (0, 0)

    def call(self, kind: str) -> None:
        """One checked call; kind: "warm-up", "timed" or "traced"."""
        out = torch.full(self.mine.hidden.shape, float("nan"), dtype=DTYPE)  # a row that is not written shows
        self.layer.record_trace = kind == "traced"
        if self.layer.group.world > 1:
            dist.barrier()
        begin = time.monotonic_ns()
        self.layer(self.mine.hidden, self.mine.ids, self.mine.weights, out=out)
        end = time.monotonic_ns()
        self.errors.append(_squared(out.double() - self.want))
        self.shipped_errors.append(_squared(out.double() - self.mine.shipped.double()))
        self.digests.append(hashlib.sha256(out.view(torch.int16).numpy().tobytes()).hexdigest()[:16])
        if kind == "timed":
            self.seconds.append((end - begin) * 1e-9)
            self.waits.append(self.layer.stats.wait_s)
            self.busies.append(self.layer.stats.busy_s)
        elif kind == "traced":
            self.traced_ns = (begin, end)

    def record(self) -> PatternRecord:
        """After the traced call."""
        stats = self.layer.stats
        return PatternRecord(
            error_squared=worst(self.errors), reference_squared=_squared(self.want),
            shipped_error_squared=worst(self.shipped_errors), shipped_squared=_squared(self.mine.shipped),
            digests=self.digests, seconds=self.seconds, bytes_dispatched=list(stats.bytes_dispatched),
            bytes_combined=list(stats.bytes_combined), wait_s=_mean(self.waits), busy_s=_mean(self.busies), trace=stats.trace,
            traced_ns=self.traced_ns)


def _squared(tensor: Tensor) -> float:
    return float(tensor.double().square().sum())


def _mean(calls: list[dict[str, float]]) -> dict[str, float]:
    return {phase: sum(call.get(phase, 0.0) for call in calls) / len(calls) for call in calls for phase in call}


def _starting_roles(layer: MoELayer) -> list[str]:
    plan = layer.plan
    starts = {"send": plan.send_blocks, "place": plan.place_blocks, "compute": plan.compute_blocks, "combine": plan.combine_blocks}
    return [role for role, count in starts.items() for _ in range(max(1, count))]


def _readiness(layer: MoELayer, whole: LayerInput, counts: list[int]) -> dict[int, dict]:
    """The report of this rank's tables with one segment, and with as many as the plan has."""
    ids, plan = padded_ids(whole.ids, counts), layer.plan
    columns = -(-layer.hidden_size // plan.column_block)
    reports = {}
    for segments in sorted({1, plan.segments}):
        tables = build_tables(ids, token_counts=counts, world=len(counts), rank=layer.group.rank, num_experts=layer.num_experts,
                              mode=layer.mode, row_block=plan.row_block, segments=segments, job_chunk=plan.job_chunk)
        reports[segments] = readiness(tables, columns).to_dict()
    return reports
