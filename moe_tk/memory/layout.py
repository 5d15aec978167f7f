"""What a workspace allocates, item by item. The estimate and the allocation read the same lists, so they agree."""

from __future__ import annotations

from dataclasses import dataclass

from moe_tk.memory.geometry import Geometry

ALIGNMENT = 256       # bytes between the starts of regions
CONTROL_BYTES = 4480  # protocol::control_block; checked against the module when it is loaded
HEADER_BYTES = 256    # protocol::call_header
FLAG_LINE_BYTES = 64  # one flag of one writer


@dataclass(frozen=True)
class Item:
    """One region: name, shape, bytes of an element, where it starts, what it holds."""

    name: str
    shape: tuple[int, ...]
    item_bytes: int
    offset: int
    meaning: str

    @property
    def bytes(self) -> int:
        count = self.item_bytes
        for extent in self.shape:
            count *= extent
        return count


def place(rows: list[tuple[str, tuple[int, ...], int, str]]) -> tuple[Item, ...]:
    """Items one behind the other, each at a multiple of ALIGNMENT, from (name, shape, bytes of an element, meaning)."""
    items, offset = [], 0
    for name, shape, item_bytes, meaning in rows:
        item = Item(name, shape, item_bytes, offset, meaning)
        items.append(item)
        offset = -(-(offset + item.bytes) // ALIGNMENT) * ALIGNMENT
    return tuple(items)


def end_of(items: tuple[Item, ...]) -> int:
    """Bytes of a buffer that holds all items."""
    return -(-(items[-1].offset + items[-1].bytes) // ALIGNMENT) * ALIGNMENT if items else 0


def symmetric_items(g: Geometry) -> tuple[Item, ...]:
    """Regions of the symmetric heap of one rank: peers write into them. Fields of protocol::heap_regions."""
    arrivals = g.max_tokens if g.gathers else 0
    planes = g.max_tokens if g.scatters else 0
    return place([
        ("control", (CONTROL_BYTES,), 1, "abort flag, progress and wait records of every rank"),
        ("header", (g.world, HEADER_BYTES), 1, "what each rank says about its call"),
        ("posted", (g.world, FLAG_LINE_BYTES), 1, "epoch of each header"),
        ("done", (g.world, FLAG_LINE_BYTES), 1, "epoch that each rank has finished"),
        ("topk_ids", (g.world, g.max_tokens, g.top_k), 4, "routing of all ranks"),
        ("topk_weights", (g.world, g.max_tokens, g.top_k), 4, "routing weights of all ranks"),
        ("sent", (g.world, g.send_chunks), 4, "watermark of each chunk of rows"),
        ("arrivals", (g.world, arrivals, g.hidden), g.item_bytes, "rows of the other ranks"),
        ("combined", (g.world, g.job_chunks), 4, "watermark of each chunk of partial rows"),
        ("planes", (g.world, planes, g.out_width), g.item_bytes, "partial rows from each rank"),
    ])


def counter_items(g: Geometry) -> tuple[Item, ...]:
    """Local counters that live as long as the workspace. Fields of patterns::local_counters, and the epoch."""
    blocks, jobs = (g.max_blocks,), (g.world, g.job_chunks)
    return place([
        ("epoch", (1,), 4, "number of the call"),
        ("progress", (1,), 4, "items finished"),
        ("last_forward_ns", (1,), 8, "when the peers last heard of it"),
        ("arrived", blocks, 4, "rows placed"), ("arrived_want", blocks, 4, "... and to place"),
        ("l1_done", blocks, 4, "column blocks of GEMM 1"), ("l1_want", blocks, 4, "... and to come"),
        ("l2_done", blocks, 4, "column blocks of GEMM 2"), ("l2_want", blocks, 4, "... and to come"),
        ("freed", blocks, 4, "rows combined"), ("freed_want", blocks, 4, "... and to combine"),
        ("job_done", jobs, 4, "jobs pushed"), ("job_want", jobs, 4, "... and to push"),
    ])


def local_items(g: Geometry) -> tuple[Item, ...]:
    """Local work buffers of one rank."""
    rows = g.ring_blocks * g.row_block
    return place([
        ("gathered", (rows if g.gathers else 0, g.hidden), g.item_bytes, "arrived rows in slot order"),
        ("activated", (rows if g.gathers and g.scatters else 0, g.intermediate), g.item_bytes, "output of GEMM 1"),
        ("expert_out", (rows if g.scatters else 0, g.out_width), g.item_bytes, "output of GEMM 2"),
    ])


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of one rank, itemised. `total` is what is allocated, alignment included; weights are not in it."""

    symmetric: tuple[Item, ...]
    counters: tuple[Item, ...]
    local: tuple[Item, ...]

    @property
    def symmetric_bytes(self) -> int:
        return end_of(self.symmetric)

    @property
    def local_bytes(self) -> int:
        return end_of(self.counters) + end_of(self.local)

    @property
    def total(self) -> int:
        return self.symmetric_bytes + self.local_bytes

    def __str__(self) -> str:
        lines = [f"{'bytes':>16}  {'where':<9} item"]
        for where, items in (("symmetric", self.symmetric), ("local", self.counters), ("local", self.local)):
            lines += [f"{i.bytes:>16,}  {where:<9} {i.name} {list(i.shape)}: {i.meaning}" for i in items if i.bytes]
        lines.append(f"{self.total:>16,}  total (symmetric {self.symmetric_bytes:,}, local {self.local_bytes:,})")
        return "\n".join(lines)
