"""Times of contenders that take turns: what one sample is, in which order they come, and what is made of the samples."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

Body = Callable[[], Any]


@dataclass(frozen=True, eq=False)
class Entry:
    """Something to time: `run` launches `calls` calls; `before`, if any, runs ahead of each sample and is not timed."""

    run: Body
    calls: int = 1
    before: Body | None = None
    hide_launch: bool = True  # launched while the GPU is kept busy, so that no gap of the host is in the time
    keep: Any = None          # what `run` uses without holding it: a CUDA graph holds no tensors


class Clock(Protocol):
    """A sample of one entry on this rank, all ranks starting together."""

    def sample(self, entry: Entry) -> float:
        """Microseconds of a call."""

    def steady(self, entry: Entry, repeats: int, parts: int) -> list[float]:
        """Microseconds of a call in each of `parts` parts of `repeats` runs back to back each."""


class CpuClock:
    """Wall clock; ranks meet in a barrier."""

    def __init__(self, meet: Body) -> None:
        self.meet = meet

    def sample(self, entry: Entry) -> float:
        if entry.before:
            entry.before()
        self.meet()
        begin = time.perf_counter()
        entry.run()
        return (time.perf_counter() - begin) * 1e6 / entry.calls

    def steady(self, entry: Entry, repeats: int, parts: int) -> list[float]:
        return [self.sample(Entry(lambda: [entry.run() for _ in range(repeats)], entry.calls * repeats)) for _ in range(parts)]


class CudaClock:
    """CUDA events on the current stream. The streams of the ranks meet on the GPUs right before the first event."""

    KEEP_BUSY = 200_000      # cycles, about 0.1 ms: what comes behind is launched by then
    L2_BYTES = 256 << 20     # several times the L2 cache

    def __init__(self, device: torch.device, meet: Body, *, pause_s: float, flush_l2: bool) -> None:
        """meet: launches something that ends on all ranks together."""
        self.meet, self.pause_s = meet, pause_s
        self.dirt = torch.empty(self.L2_BYTES, dtype=torch.uint8, device=device) if flush_l2 else None

    def _start(self, entry: Entry) -> None:
        if self.pause_s:
            time.sleep(self.pause_s)
        if entry.before:
            entry.before()
        if self.dirt is not None:
            self.dirt.zero_()
        if entry.hide_launch:
            torch.cuda._sleep(self.KEEP_BUSY)
        self.meet()

    def sample(self, entry: Entry) -> float:
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._start(entry)
        first.record()
        entry.run()
        last.record()
        last.synchronize()
        return first.elapsed_time(last) * 1e3 / entry.calls

    def steady(self, entry: Entry, repeats: int, parts: int) -> list[float]:
        events = [torch.cuda.Event(enable_timing=True) for _ in range(parts + 1)]
        self.meet()
        events[0].record()
        for event in events[1:]:
            for _ in range(repeats):
                entry.run()
            event.record()
        events[-1].synchronize()
        return [first.elapsed_time(last) * 1e3 / (entry.calls * repeats) for first, last in zip(events, events[1:], strict=False)]


def turns(names: Sequence[str], rounds: int) -> list[str]:
    """Who comes when: every name once a round, each round beginning with the next one, so that none always follows the same."""
    order = []
    for index in range(rounds):
        shift = index % len(names) if names else 0
        order += [*names[shift:], *names[:shift]]
    return order


def take_turns(clock: Clock, entries: Mapping[str, Entry], rounds: int) -> dict[str, list[float]]:
    """This rank's samples by name, in the order of the rounds; one round before them warms up."""
    samples: dict[str, list[float]] = {name: [] for name in entries}
    for index, name in enumerate(turns(list(entries), rounds + 1)):
        us = clock.sample(entries[name])
        if index >= len(entries):
            samples[name].append(us)
    return samples


def slower_rank(samples: Sequence[Sequence[float]]) -> list[float]:
    """The slowest rank of each round; samples [world][rounds]."""
    return [max(values) for values in zip(*samples, strict=True)]


def summary(values: Sequence[float]) -> dict[str, float]:
    """Median, extremes and quartiles of the rounds, in microseconds."""
    ordered = sorted(values)
    low, high = ordered[len(ordered) // 4], ordered[(3 * len(ordered)) // 4 if len(ordered) > 1 else 0]
    return {"median": round(statistics.median(ordered), 2), "min": round(ordered[0], 2), "max": round(ordered[-1], 2),
            "quartiles": [round(low, 2), round(high, 2)], "rounds": len(ordered)}
