"""What a rank does: goes through shapes, modes, dtypes and tokens, and on rank 0 says and hands back every line."""

from __future__ import annotations

import gc
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist

from moe_tk.bench.contender import Contender, NotAvailable
from moe_tk.bench.environment import gpu_state
from moe_tk.bench.floor import count_traffic, floor_of
from moe_tk.bench.lines import Result, measure_line
from moe_tk.bench.options import Options
from moe_tk.bench.ours import Ours
from moe_tk.bench.problem import Problem
from moe_tk.bench.ranks import Ranks, describe
from moe_tk.bench.rivals import NAMES as RIVALS
from moe_tk.bench.rivals import make_rival
from moe_tk.bench.routings import label
from moe_tk.bench.shapes import Shape
from moe_tk.bench.timing import Clock, CpuClock, CudaClock
from moe_tk.config import env
from moe_tk.errors import ArgumentError

Say = Callable[[str, Any], None]  # ("stage", text) or ("line", dict)
ATTRIBUTED = "two_kernel"


def rank_main(rank: int, world: int, options: Options, say_to: Any = None) -> list[dict[str, Any]] | str:
    """The lines on rank 0 ([] elsewhere), or the text of the failure. say_to: a connection for what is said meanwhile."""
    def say(kind: str, what: Any) -> None:
        if rank == 0 and say_to is not None:
            say_to.send((kind, what))

    try:
        return measure(options, say)
    except Exception as error:
        return traceback.format_exc() if options.debug else f"{type(error).__name__}: {error}"


def own_device(options: Options) -> torch.device:
    """This rank's GPU: by its number on this machine under torchrun, else the current one. It is the current one afterwards."""
    if options.backend == "cpu":
        torch.set_num_threads(1)  # ranks share the cores
        return torch.device("cpu")
    if dist.is_torchelastic_launched():
        local = dist.get_node_local_rank()
        if local >= torch.cuda.device_count():
            raise ArgumentError(f"rank {local} of this machine has no GPU of its own: there are {torch.cuda.device_count()}")
        torch.cuda.set_device(local)
    return torch.device("cuda", torch.cuda.current_device())


def measure(options: Options, say: Say) -> list[dict[str, Any]]:
    """Every line. A collective of the default group."""
    device = own_device(options)
    ranks = Ranks(device)
    clock: Clock = CpuClock(ranks.meet) if device.type == "cpu" else CudaClock(
        device, ranks.meet, pause_s=options.pause_ms / 1e3, flush_l2=options.flush_l2)
    lines: list[dict[str, Any]] = []
    for shape in options.shapes:
        for mode in options.modes:
            for dtype in options.dtypes:
                bench = LayerBench(shape, mode, dtype, options, ranks, clock, say)
                lines += bench.lines()
                del bench
                gc.collect()
                if device.type == "cuda":
                    torch.cuda.empty_cache()
    return lines


class LayerBench:
    """All lines of one shape, mode and dtype: weights and contenders are made once."""

    def __init__(self, shape: Shape, mode: str, dtype: str, options: Options, ranks: Ranks, clock: Clock, say: Say) -> None:
        self.shape, self.mode, self.dtype, self.options, self.ranks, self.clock, self.say = (
            shape, mode, dtype, options, ranks, clock, say)
        self.title = f"{shape.name} {mode.upper()} {dtype}"
        say("stage", f"{self.title}: weights and contenders")
        self.problem = Problem(shape, mode, world=ranks.world, rank=ranks.rank, device=ranks.device, seed=options.seed)
        self.contenders: dict[str, Contender] = {}
        self.missing: dict[str, str] = {}  # why it cannot run
        for name in (*options.patterns, *options.against):
            make = self._rival if name in RIVALS else self._ours
            contender, why = ranks.failure(lambda make=make, name=name: make(name), f"{name}: make")
            if why:
                self.missing[name] = why
            else:
                self.contenders[name] = contender

    def _ours(self, pattern: str) -> Contender:
        like = next((other for other in self.contenders.values() if isinstance(other, Ours)), None)
        return Ours(pattern, self.problem, None, max_tokens=max(self.options.tokens), dtype=self.dtype, like=like,
                    timeout_s=max(env("MOE_TK_TIMEOUT_S"), 60.0 if self.options.backend == "cpu" else 0.0))

    def _rival(self, name: str) -> Contender:
        if self.dtype != "bf16":
            raise NotAvailable(f"{name} has no adapter for {self.dtype}")
        return make_rival(name, self.problem, self.ranks)

    def lines(self) -> list[dict[str, Any]]:
        found = []
        for routing in self.options.routings:
            for tokens in self.options.tokens:
                self.say("stage", f"{self.title}: {routing}, T = {tokens}")
                line = self._line(routing, tokens)
                found.append(line)
                self.say("line", line)
        return found

    def _line(self, routing: str, tokens: int) -> dict[str, Any]:
        shape, ranks, begin = self.shape, self.ranks, time.monotonic()
        head: dict[str, Any] = {"shape": shape.name, **{name: value for name, value in asdict(shape).items() if name != "name"},
                                "mode": self.mode, "dtype": self.dtype, "routing": label(routing), "tokens": tokens,
                                "world": ranks.world}
        try:
            batch = self.problem.batch(routing, tokens)
        except ArgumentError as error:  # the same on all ranks
            return {**head, "why": describe(error).replace(routing, label(routing)), "contenders": []}
        traffic = count_traffic(batch.all_ids, shape, mode=self.mode, dtype=self.dtype, world=ranks.world)
        results = {name: Result(name, name not in RIVALS, against=name in self.options.against)
                   for name in (*self.options.patterns, *self.options.against)}
        for name, why in self.missing.items():
            results[name].fail("not available", why)
        measure_line(list(self.contenders.values()), results, batch, self.problem.sample(batch), ranks=ranks, options=self.options,
                     dtype=self.dtype, clock=self.clock)
        line = {**head, "traffic": asdict(traffic), "floor": floor_of(traffic, self.options.numbers, self.dtype).to_dict(),
                "contenders": [result.to_dict() for result in results.values()],
                "calls_per_sample": self.options.calls_per_sample(tokens), "gpu": gpu_state(ranks.device)}
        line |= compare(line, to_floor=self.options.backend != "cpu")  # the floor is a GPU's
        line |= self._inside(batch)
        return {**line, "seconds": round(time.monotonic() - begin, 2)}

    def _inside(self, batch: Any) -> dict[str, Any]:
        """Attribution and sweep of the fused pattern, as asked for."""
        from moe_tk.bench.attribution import attribute, sweep_export  # CUDA only

        fused = self.contenders.get(ATTRIBUTED)
        asked = {"attribution": attribute} if self.options.attribute else {}
        asked |= {"sweep": sweep_export} if self.options.sweep else {}
        if asked and fused is None:
            return {name: {"why": f"pattern {ATTRIBUTED} is not among the contenders"} for name in asked}
        return {name: body(fused, batch, ranks=self.ranks, clock=self.clock, rounds=self.options.rounds,
                           calls=self.options.calls_per_sample(batch.tokens)) for name, body in asked.items()}


def time_of(contender: dict[str, Any]) -> float | None:
    """The number of the table: calls in graphs, or eager ones where there are none."""
    us = contender["us"]
    return next((us[kind]["median"] for kind in ("graph", "eager") if kind in us), None)


def compare(line: dict[str, Any], *, to_floor: bool = True) -> dict[str, Any]:
    """The best of ours and of what it is compared with (`best_rival`), and our ratios to the floor and to that."""
    best: dict[bool, tuple[float, str]] = {}
    for contender in line["contenders"]:
        us = time_of(contender)
        side = contender["against"]
        if us is not None and (side not in best or us < best[side][0]):
            best[side] = (us, contender["name"])
    ours, rival = best.get(False), best.get(True)
    return {"ours": ours and {"name": ours[1], "us": ours[0]}, "best_rival": rival and {"name": rival[1], "us": rival[0]},
            "to_floor": round(ours[0] / line["floor"]["us"], 4) if to_floor and ours and line["floor"]["us"] else None,
            "to_rival": round(ours[0] / rival[0], 4) if ours and rival else None}
