"""From the records of the ranks to results: one per mode and pattern, judged."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from moe_tk.demo.overlap import SERIAL, Overlap, overlap
from moe_tk.demo.records import PatternRecord, RankRecord

PHASES = ("dispatch", "gemm1", "gemm2", "combine", "reduce")


@dataclass(frozen=True)
class Result:
    """One pattern in one mode over all ranks."""

    mode: str
    pattern: str
    error: float                 # relative, of the worst call, against the float64 reference
    shipped_error: float         # the same against the output that ships
    budget: float
    repeats_equal: bool          # all calls gave the same bits on every rank
    num_calls: int
    seconds: list[float]         # of each timed call, slowest rank
    ratio: float | None          # median time / median time of the serial path in the same run; None: it did not run
    bytes_dispatched: list[list[int]] | None  # [from][to], one call; None on the serial path
    bytes_combined: list[list[int]] | None
    wait_s: dict[str, float]     # by phase, summed over ranks and blocks, mean of the timed calls
    busy_s: dict[str, float]
    overlap: Overlap
    records: list[PatternRecord]

    @property
    def name(self) -> str:
        return f"{self.mode.upper()} {self.pattern}"

    @property
    def has_trace(self) -> bool:
        """Whether the inside of a call was recorded: of fused patterns on the CPU back end."""
        return any(record.trace for record in self.records)

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)

    @property
    def within_budget(self) -> bool:
        """False also for NaN."""
        return self.error <= self.budget and self.shipped_error <= self.budget

    @property
    def passed(self) -> bool:
        return self.within_budget and self.repeats_equal


def error_budget(ranks: Sequence[RankRecord]) -> float:
    """The relative error that rounding explains for the element type that ran."""
    return ranks[0].budget


def reference_difference(ranks: Sequence[RankRecord]) -> float:
    """Relative difference between the reference computed now and the output that ships."""
    return _relative(sum(rank.reference_error_squared for rank in ranks), sum(rank.shipped_squared for rank in ranks))


def merge(ranks: Sequence[RankRecord]) -> list[Result]:
    """One Result per mode and pattern, in the order in which they ran."""
    budget = error_budget(ranks)
    results = []
    for mode, record in ranks[0].modes.items():
        serial = _slowest([rank.modes[mode].patterns["serial"] for rank in ranks]) if "serial" in record.patterns else None
        for pattern in record.patterns:
            results.append(_merge_one(mode, pattern, [rank.modes[mode].patterns[pattern] for rank in ranks], budget, serial))
    return results


def _merge_one(mode: str, pattern: str, records: list[PatternRecord], budget: float, serial: list[float] | None) -> Result:
    seconds = _slowest(records)
    moved = any(record.bytes_dispatched for record in records)
    return Result(
        mode=mode, pattern=pattern, budget=budget, seconds=seconds, num_calls=len(records[0].digests),
        error=_relative(sum(r.error_squared for r in records), sum(r.reference_squared for r in records)),
        shipped_error=_relative(sum(r.shipped_error_squared for r in records), sum(r.shipped_squared for r in records)),
        repeats_equal=all(len(set(record.digests)) == 1 for record in records),
        ratio=None if serial is None else statistics.median(seconds) / statistics.median(serial),
        bytes_dispatched=[r.bytes_dispatched for r in records] if moved else None,
        bytes_combined=[r.bytes_combined for r in records] if moved else None,
        wait_s=_by_phase([r.wait_s for r in records]), busy_s=_by_phase([r.busy_s for r in records]),
        overlap=SERIAL if pattern == "serial" else overlap([r.trace for r in records], *call_span(records)), records=records)


def call_span(records: Sequence[PatternRecord]) -> tuple[int, int]:
    """(begin, end) of the traced call: from the first rank that called to the last that returned."""
    return min(r.traced_ns[0] for r in records), max(r.traced_ns[1] for r in records)


def verdict(results: Sequence[Result]) -> str:
    """All of it in one line."""
    over = [result.name for result in results if not result.within_budget]
    differ = [result.name for result in results if not result.repeats_equal]
    texts = [f"over the error budget: {', '.join(over)}"] * bool(over) + [f"repeats differ: {', '.join(differ)}"] * bool(differ)
    if texts:
        return "; ".join(texts)
    return f"{len(results)} of {len(results)} within the error budget, repeats bitwise equal"


def same_bits(first: Result, second: Result) -> bool:
    """Whether two patterns gave the same bits on every rank."""
    return all(set(a.digests) == set(b.digests) for a, b in zip(first.records, second.records, strict=True))


def _slowest(records: Sequence[PatternRecord]) -> list[float]:
    return [max(call) for call in zip(*(record.seconds for record in records), strict=True)]


def _relative(error_squared: float, norm_squared: float) -> float:
    return math.sqrt(error_squared) if norm_squared == 0 else math.sqrt(error_squared / norm_squared)


def _by_phase(ranks: Sequence[dict[str, float]]) -> dict[str, float]:
    return {phase: sum(rank.get(phase, 0.0) for rank in ranks) for phase in PHASES if any(phase in rank for rank in ranks)}
