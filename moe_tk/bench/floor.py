"""What a call must do at least, counted from its actual routing, and how long that takes on a machine of given rates."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from moe_tk.bench.shapes import Shape
from moe_tk.errors import ArgumentError, TopologyError
from moe_tk.schedule.ownership import local_experts, shard_range

SCALE_GROUP = 128  # e4m3: elements of a row that share one float32 scale


@dataclass(frozen=True)
class MachineNumbers:
    """Rates of one GPU; the defaults are what two H200 (NV18) reached in short runs."""

    hbm_tbs: float = 4.59        # read
    bf16_tflops: float = 795.0
    fp8_tflops: float = 1458.0
    wire_gbs: float = 364.0      # each way, both ways busy

    def flops(self, dtype: str) -> float:
        """FLOP/s of one GPU."""
        return (self.fp8_tflops if dtype == "e4m3" else self.bf16_tflops) * 1e12


@dataclass(frozen=True)
class Traffic:
    """What one call does on the rank that has most of it; each field may be of another rank."""

    rows: int            # (token, choice) pairs computed
    touched: int         # experts with at least one row
    weight_bytes: int    # of the touched experts
    flops: int
    wire_bytes: int      # in one direction: rows out and partial rows back, or the other way round


@dataclass(frozen=True)
class Floor:
    """Microseconds. `us` is the largest of the three."""

    weights_us: float
    flops_us: float
    wire_us: float

    @property
    def us(self) -> float:
        return max(self.weights_us, self.flops_us, self.wire_us)

    @property
    def bound(self) -> str:
        """What bounds it: "weights", "flops" or "wire"."""
        return max(("weights", self.weights_us), ("flops", self.flops_us), ("wire", self.wire_us), key=lambda item: item[1])[0]

    def to_dict(self) -> dict[str, float | str]:
        return {**asdict(self), "us": self.us, "bound": self.bound}


def count_traffic(ids: Tensor, shape: Shape, *, mode: str, dtype: str, world: int) -> Traffic:
    """ids [world * T, k]: rank r has rows r * T ...; ids that are no expert are skipped.

    A row crosses the wire once to each other rank that wants the token, and comes back once as a bfloat16 partial row.
    """
    tokens = ids.shape[0] // world
    element = 1 if dtype == "e4m3" else 2
    sent_row = shape.hidden * element + (4 * -(-shape.hidden // SCALE_GROUP) if dtype == "e4m3" else 0)
    moved = torch.zeros(world, world, dtype=torch.int64)  # [to, from] tokens
    rows, touched, flops, weight_bytes = 0, 0, 0, 0
    for rank in range(world):
        first, count = local_experts(shape.experts, world, rank, mode)
        inter = shape.intermediate if mode == "ep" else shard_range(shape.intermediate, world, rank)[1]
        mine = (ids >= max(first, 0)) & (ids < first + count)
        pairs, used = int(mine.sum()), int(torch.unique(ids[mine]).numel())
        moved[rank] = mine.any(1).view(world, tokens).sum(1) if tokens else 0
        rows, touched = max(rows, pairs), max(touched, used)
        flops = max(flops, pairs * 6 * shape.hidden * inter)
        weight_bytes = max(weight_bytes, used * 3 * shape.hidden * inter * element)
    moved.fill_diagonal_(0)
    into, out_of = moved.sum(1), moved.sum(0)  # rows that a rank fetches; rows that others fetch from it
    back = 2 * shape.hidden
    wire = torch.maximum(into * sent_row + out_of * back, out_of * sent_row + into * back).max()
    return Traffic(rows, touched, weight_bytes, flops, int(wire))


def floor_of(traffic: Traffic, numbers: MachineNumbers, dtype: str) -> Floor:
    """The three times that nothing can beat."""
    return Floor(weights_us=traffic.weight_bytes / numbers.hbm_tbs / 1e6, flops_us=traffic.flops / numbers.flops(dtype) * 1e6,
                 wire_us=traffic.wire_bytes / numbers.wire_gbs / 1e3)


def wire_rate(path: Path) -> float:
    """GB/s each way, both ways busy, of the slowest pair of a report of `moe_tk doctor --save` with full probes."""
    from moe_tk.topology.report import facts_from_json

    try:
        _, probes = facts_from_json(json.loads(path.read_text()))
    except (OSError, ValueError, TopologyError) as error:
        raise ArgumentError(f"--doctor {path}: no report of moe_tk doctor can be read: {error}") from None
    rates = [probes.best_rate(src, dst, load="both-ways", payload=None) for src in probes.uuids for dst in probes.uuids
             if src != dst] if probes else []
    found = [rate.gbs for rate in rates if rate]
    if not found:
        raise ArgumentError(f"--doctor {path}: it has no measured rates of pairs: make it with full probes, or give --wire-gbs")
    return min(found)
