"""One line of the table: contenders prepared, checked, timed in turns. Runs on every rank alike."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from moe_tk import reference
from moe_tk.bench.contender import Call, Contender
from moe_tk.bench.options import Options
from moe_tk.bench.problem import Batch, Sample
from moe_tk.bench.ranks import Ranks, describe
from moe_tk.bench.timing import Clock, Entry, slower_rank, summary, take_turns

RIVAL_BUDGET = 2  # times the error budget of our layer: partial sums may be added in bfloat16
E4M3_BUDGET = 0.08  # rows, both weights and the activation are each rounded by 0.025 of their norm: together 0.05
STEADY_PARTS = 10
STEADY_MAX_REPEATS = 20_000


@dataclass
class Result:
    """What a contender gave: `state` "ok", "not available" or "failed", with the reason."""

    name: str
    ours: bool
    against: bool  # is what the others are compared with: a rival, or a pattern of ours that --against names
    state: str = "ok"
    why: str | None = None
    error: float | None = None
    notes: list[str] = field(default_factory=list)
    us: dict[str, dict[str, Any]] = field(default_factory=dict)  # "graph", "eager", "sustained": summaries

    @property
    def best(self) -> float | None:
        """The number of the table: calls in a graph, or eager ones where there is no graph. Microseconds."""
        for kind in ("graph", "eager"):
            if kind in self.us:
                return self.us[kind]["median"]
        return None

    def fail(self, state: str, why: str) -> None:
        self.state, self.why = state, why
        self.us.clear()

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.name, "ours": self.ours, "against": self.against, "state": self.state, "why": self.why,
                "error": None if self.error is None or math.isnan(self.error) else self.error, "notes": self.notes, "us": self.us}


def measure_line(contenders: list[Contender], results: dict[str, Result], batch: Batch, sample: Sample, *, ranks: Ranks,
                 options: Options, dtype: str, clock: Clock) -> None:
    """Fills `results`. A contender that fails on any rank is out on all, and costs only itself. Results are checked before the
    timing and after it: what was timed must have computed them."""
    calls: dict[str, Call] = {}
    entries: dict[str, dict[str, Entry]] = {"graph": {}, "eager": {}}
    calls_per_sample = options.calls_per_sample(batch.tokens)
    for contender in contenders:
        result = results[contender.name]
        call = _prepared(contender, result, batch, sample, ranks, dtype)
        if call is None:
            continue
        calls[contender.name] = call
        graph = None
        if ranks.device.type == "cuda" and call.capturable:
            graph, why = ranks.failure(lambda call=call: capture(call.run, calls_per_sample), f"{contender.name}: capture")
            if why:
                result.notes.append(f"not captured: {why}")
        if graph is not None:
            entries["graph"][contender.name] = Entry(graph.replay, calls_per_sample, keep=call)
        if graph is None or options.eager:
            entries["eager"][contender.name] = Entry(_repeat(call.run, calls_per_sample), calls_per_sample, hide_launch=False)
    for call in calls.values():
        call.result.fill_(float("nan"))
    for kind, some in entries.items():
        _time(kind, some, results, ranks, options, clock)
    if options.sustained_s:
        _time_steady({**entries["eager"], **entries["graph"]}, results, ranks, options, clock)
    for contender in contenders:
        if results[contender.name].state == "ok":
            _check(contender, results[contender.name], calls[contender.name], sample, ranks, dtype, "after timing")


def _repeat(run: Callable[[], Any], calls: int) -> Callable[[], None]:
    def body() -> None:
        for _ in range(calls):
            run()

    return body


def capture(run: Callable[[], Any], calls: int) -> torch.cuda.CUDAGraph:
    """A CUDA graph of `calls` calls; run() has been called before."""
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(calls):
            run()
    return graph


def _prepared(contender: Contender, result: Result, batch: Batch, sample: Sample, ranks: Ranks, dtype: str) -> Call | None:
    """The call, right on all ranks; None with the reason in `result`."""
    call, why = ranks.failure(lambda: contender.prepare(batch), f"{contender.name}: prepare")
    if why:
        result.fail("failed", why)
        return None

    _, why = ranks.failure(call.run, f"{contender.name}: first call")
    if why:
        result.fail("failed", why)
        return None
    return call if _check(contender, result, call, sample, ranks, dtype, "first call") else None


def _check(contender: Contender, result: Result, call: Call, sample: Sample, ranks: Ranks, dtype: str, when: str) -> bool:
    """Whether what the calls so far have written is right on all ranks; else the reason is in `result`."""
    def squares() -> tuple[float, float]:
        contender.finish()
        return sample.squares(call.result)

    mine, why = ranks.failure(squares, f"{contender.name}: {when}")
    if why:
        result.fail("failed", why)
        return False
    everyone = ranks.exchange(mine, f"{contender.name}: error")
    error, norm = (sum(values) ** 0.5 for values in zip(*everyone, strict=True))
    result.error = error / norm if norm else error
    budget = error_budget(dtype) * (1 if contender.ours else RIVAL_BUDGET)
    if not result.error <= budget:
        result.fail("failed", f"wrong result ({when}): relative error {result.error:.3g}, wanted at most {budget:g}")
        return False
    return True


def error_budget(dtype: str) -> float:
    """Relative error that rounding explains."""
    return E4M3_BUDGET if dtype == "e4m3" else reference.ERROR_BUDGET[torch.bfloat16]


def _time(kind: str, entries: dict[str, Entry], results: dict[str, Result], ranks: Ranks, options: Options, clock: Clock) -> None:
    if not entries:
        return
    samples, why = ranks.failure(lambda: take_turns(clock, entries, options.rounds), f"{kind} times")
    for name in entries:
        if why:
            results[name].fail("failed", why)
            continue
        everyone = ranks.exchange(samples[name], f"{name}: {kind} times")
        results[name].us[kind] = summary(slower_rank(everyone))


def _time_steady(entries: dict[str, Entry], results: dict[str, Result], ranks: Ranks, options: Options, clock: Clock) -> None:
    """Each contender alone, back to back, for about options.sustained_s; the second half counts, when clocks have settled."""
    for name, entry in entries.items():
        result = results[name]
        if result.state != "ok" or result.best is None:
            continue
        repeats = int(options.sustained_s * 1e6 / (result.best * entry.calls * STEADY_PARTS))
        repeats = max(1, min(STEADY_MAX_REPEATS, repeats))  # equal on all ranks: the median is
        try:
            mine, reason = clock.steady(entry, repeats, STEADY_PARTS), None
        except RuntimeError as error:
            mine, reason = [], describe(error)
        if (reason := ranks.agree(reason, f"{name}: sustained")) is not None:
            result.notes.append(f"sustained: {reason}")
            continue
        parts = slower_rank(ranks.exchange(mine, f"{name}: sustained"))[STEADY_PARTS // 2:]
        result.us["sustained"] = {**summary(parts), "median": round(statistics.median(parts), 2),
                                  "seconds": round(sum(mine) * repeats * entry.calls / 1e6, 3)}
