"""What must hold for the trace of one call: complete, ordered, and in accord with its tables. No GPU needed; the check on GPUs at
the end does."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import numpy as np

from moe_tk.memory.nvlink_layout import FUSED_COLUMN_BLOCK
from moe_tk.trace.clocks import Offset
from moe_tk.trace.kinds import BUILD_BLOCKS, CONSUMERS, GPU_KERNELS, LOADERS, STORERS, kind_number
from moe_tk.trace.model import Laps, RankTrace
from moe_tk.trace.summary import GATHER, OPEN, OPEN_PHASES, SCATTER

COLUMN_GROUPS = 4      # column_work.hpp MAX_COL_GROUPS
SENDS = tuple(kind_number(name) for name in ("zero counters", "export rows", "wait for rows"))  # of open_call's last sending block
TOLERANCE_NS = 2000.0  # a stamp is written a moment after what it tells of; plus a tick of the timer


def check_trace(trace: RankTrace, tables: dict[str, np.ndarray], *, row_block: int, top_k: int, tokens: int,
                columns: int, per_step: int = 1) -> None:
    """tables: those of TABLES, as the workspace has them; columns: column blocks of GEMM 2, per_step of them in a step of which the
    column groups are made. Raises AssertionError."""
    assert trace.lost == 0
    _, _, jobs, tasks1, tasks2 = (int(count) for count in tables["counts"])
    error = TOLERANCE_NS + trace.clock["timer_period_ns"]
    gather, scatter = (trace.laps.where(trace.laps.kernel == kernel) for kernel in (GATHER, SCATTER))
    _check_order(trace.laps)
    _check_open_call(trace.laps)
    _check_sends(trace.laps.where(trace.laps.kernel == OPEN), error)
    _check_tiles(gather, tables["tasks1"][:tasks1], gated=False)
    _check_tiles(scatter, tables["tasks2"][:tasks2], gated=True)
    _check_loaders(gather, trace.laps.end[trace.laps.kernel == OPEN].max(), error)
    _check_loads(scatter, _last_push(gather, column=None), error, "GEMM 2 loaded {:.0f} ns before GEMM 1 had pushed its row block")
    steps = -(-columns // per_step)
    _check_batches(scatter, "combine", jobs, steps)
    _check_batches(scatter, "reduce", tokens, steps)
    _check_jobs(scatter, tables["job_order"][:jobs], tables["slots"].reshape(-1, top_k), row_block, steps, per_step, error)


def _check_order(laps: Laps) -> None:
    """No lap of a writer begins before the one before it has ended, and none ends before it begins."""
    assert (laps.end >= laps.begin).all()
    lane = (laps.kernel * 4096 + laps.block) * 16 + laps.writer
    same = lane[1:] == lane[:-1]
    assert (laps.begin[1:][same] >= laps.end[:-1][same] - 1.0).all()


def _check_open_call(laps: Laps) -> None:
    mine = laps.where((laps.kernel == OPEN) & (laps.block < BUILD_BLOCKS))
    phases = [tuple(mine.kind[mine.block == block]) for block in range(BUILD_BLOCKS)]
    assert phases[0] == OPEN_PHASES, "block 0"
    for block, others in enumerate(phases[1:], 1):  # where one block builds, the others leave when the headers are there
        assert others == phases[1] and others in (OPEN_PHASES, OPEN_PHASES[:2]), f"block {block}"


def _check_sends(opened: Laps, error: float) -> None:
    """All blocks of open_call that do not build send rows; one of them, behind all others, waits for those of the other ranks."""
    mine = opened.where(opened.block >= BUILD_BLOCKS)
    kinds = {int(block): tuple(mine.kind[mine.block == block]) for block in np.unique(mine.block)}
    waiting = [block for block, found in kinds.items() if found == SENDS]
    assert len(waiting) == 1, f"blocks {waiting} wait for rows, wanted one"
    assert all(found == SENDS[:2] for block, found in kinds.items() if block != waiting[0])
    late = mine.end[mine.kind == SENDS[1]].max() - mine.end[mine.kind == SENDS[2]].max()
    assert late <= error, f"block {waiting[0]} is through with its wait for rows {late:.0f} ns before the last block has sent"


def _check_tiles(laps: Laps, tasks: np.ndarray, *, gated: bool) -> None:
    """Each task is loaded by each loader, computed or skipped by each consumer warpgroup, stored and pushed, exactly once. Weights
    are loaded ahead where a gate is shut; where there are no gates _check_loaders says when."""
    wanted = Counter((tasks[:, 2].astype(np.int64) << 8 | tasks[:, 3]).tolist())
    assert set(wanted.values()) <= {1}

    def tiles(writer: int, *names: str) -> Counter:
        chosen = (laps.writer == writer) & np.isin(laps.kind, [kind_number(name) for name in names])
        return Counter(laps.detail[chosen].tolist())

    for loader in _loaders(laps):
        assert tiles(loader, "load") == wanted
        gates = tiles(loader, "gate")  # a lap where it was asked in front of the tile, not in the middle of the one before
        assert tiles(loader, "load weights") <= gates <= wanted if gated else not gates
        assert tiles(loader, "load weights") <= wanted
    for consumer, storer in zip(CONSUMERS, STORERS, strict=True):
        # Not any lap: the warp that is idle beside one consumer warpgroup waits for the launch before too.
        there = [bool(tiles(consumer, "multiply", "skip")), bool(tiles(storer, "store", "push"))]
        assert len(set(there)) == 1, f"consumer {consumer} and storer {storer}: {there}"
        if not there[0] and consumer != CONSUMERS[0]:
            continue  # a tile of one warpgroup
        assert tiles(consumer, "multiply", "skip") == wanted
        assert tiles(consumer, "emit") == tiles(consumer, "multiply") == tiles(storer, "store")
        assert tiles(storer, "push") == wanted
    assert tiles(CONSUMERS[0], "multiply") == wanted  # the first rows of a block are never padding


def _loaders(laps: Laps) -> tuple[int, ...]:
    """Writers that load, of the kernel that these laps are of."""
    return LOADERS[GPU_KERNELS[int(laps.kernel[0])]] if len(laps) else ()


def _check_loaders(gather: Laps, opened: float, error: float) -> None:
    """Each loader of a block loads weights once, of its first tile, and then every tile; none begins before open_call has ended,
    and both loaders take the same tiles in the same order."""
    ahead, load = kinds = [kind_number(name) for name in ("load weights", "load")]
    mine = gather.where(np.isin(gather.writer, _loaders(gather)) & np.isin(gather.kind, kinds))
    for block in np.unique(mine.block):
        of_block = [mine.where((mine.block == block) & (mine.writer == writer)) for writer in _loaders(gather)]
        for laps in of_block:
            assert laps.kind.tolist() == [ahead, *[load] * max(1, len(laps) - 1)], f"block {block}: {laps.kind}"
            assert laps.detail[0] == laps.detail[1], f"block {block} loads another tile's weights"
            early = opened - laps.begin[0]
            assert early <= error, f"block {block} loads {early:.0f} ns before the tables and rows are there"
        assert len({tuple(laps.detail.tolist()) for laps in of_block}) == 1, f"block {block}: loaders with different tiles"


class Edges(NamedTuple):
    """Moments of a rank, ns on its own clock. loads: None without tiles."""

    sent: int          # its last rows
    waited: int        # open_call's wait for the rows of the others was over
    loads: int | None  # the first loader of gather_gemm began


def edges_of(trace: RankTrace) -> Edges:
    """Of a trace that check_trace() has passed."""
    laps = trace.laps
    sent, waited = (laps.end[laps.kind == kind].max() for kind in SENDS[1:])
    loads = laps.begin[(laps.kernel == GATHER) & np.isin(laps.kind, [kind_number("load weights"), kind_number("load")])]
    first = trace.origin_ns + int(loads.min()) if len(loads) else None
    return Edges(trace.origin_ns + int(sent), trace.origin_ns + int(waited), first)


def check_sources(edges: list[Edges], offsets: dict[int, Offset]) -> None:
    """On no rank is the wait for rows over, or does GEMM 1 load, before every other rank has sent its rows. offsets: to rank 0's
    clock, of the other ranks."""
    known = {0: Offset(0.0, 0.0), **offsets}
    for rank, mine in enumerate(edges):
        for other, theirs in enumerate(edges):
            if rank == other:
                continue
            ahead = known[other].offset_ns - known[rank].offset_ns
            error = known[other].error_ns + known[rank].error_ns + TOLERANCE_NS
            for what, at in (("the wait for rows", mine.waited), ("the first load", mine.loads)):
                early = -np.inf if at is None else theirs.sent - at + ahead
                assert early <= error, f"{what} of rank {rank} came {early:.0f} ns before rank {other} had sent its rows"


def _check_loads(laps: Laps, ready: np.ndarray, error: float, text: str) -> None:
    """The last part of each task's loads begins after its row block's `ready`."""
    loads = laps.where(laps.kind == kind_number("load"))
    early = ready[loads.detail >> 8] - loads.begin
    assert early.max(initial=-np.inf) <= error, text.format(early.max())


def _last_push(laps: Laps, column: tuple[int, int] | None) -> np.ndarray:
    """[row blocks] when the last tile was pushed; of the columns in a range, if given."""
    pushed = laps.where((laps.kind == kind_number("push")) & (laps.writer == STORERS[0]))
    if column is not None:
        pushed = pushed.where(((pushed.detail & 0xff) >= column[0]) & ((pushed.detail & 0xff) < column[1]))
    last = np.full(int((laps.detail[laps.kind == kind_number("push")] >> 8).max(initial=0)) + 1, -np.inf)
    np.maximum.at(last, pushed.detail >> 8, pushed.end)
    return last


def _check_batches(laps: Laps, name: str, entries: int, steps: int) -> None:
    """Every entry is in one batch, and every batch is done equally often (its slices) in each column group."""
    details = Counter(laps.detail[laps.kind == kind_number(name)].tolist())
    firsts = sorted({detail & 0xfffff for detail in details})
    groups = min(COLUMN_GROUPS, steps) if entries else 0
    assert {detail >> 20 for detail in details} == set(range(groups))
    batch = firsts[1] if len(firsts) > 1 else max(1, entries)
    assert firsts == list(range(0, entries, batch))
    assert len(details) == len(firsts) * groups and len(set(details.values())) <= 1


def _check_jobs(laps: Laps, job_order: np.ndarray, slots: np.ndarray, row_block: int, steps: int, per_step: int,
                error: float) -> None:
    """No batch of jobs is taken for ready before the tiles of its rows, in its column group, were pushed."""
    ready = laps.where(laps.kind == kind_number("wait for jobs"))
    firsts = ready.detail & 0xfffff
    if not len(ready):
        return
    several = np.unique(firsts)
    batch = int(several[1]) if len(several) > 1 else len(job_order)
    groups = min(COLUMN_GROUPS, steps)
    for group in range(groups):
        pushed_at = _last_push(laps, (group * steps // groups * per_step, (group + 1) * steps // groups * per_step))
        for i in np.flatnonzero(ready.detail >> 20 == group):
            mine = slots[job_order[firsts[i]:firsts[i] + batch]]
            early = pushed_at[mine[mine >= 0] // row_block].max() - ready.end[i]
            assert early <= error, f"jobs {firsts[i]} began {early:.0f} ns before their tiles were pushed"


TABLES = ("counts", "tasks1", "tasks2", "slots", "job_order")


def traced_layer(ranks) -> None:
    """On every rank: a traced layer is right, and its trace complete and in order."""
    from moe_tk.trace.clocks import between, offset_of
    from moe_tk.trace.decode import decode
    from tests.cuda.checks import BUDGET, Case, Data

    for case in (Case(512, 8, 64, (512, 300), "ep", 128, hidden=2048, inter=768),
                 Case(512, 4, 16, (512,), "tp", 64, hidden=1024, inter=256),
                 Case(64, 2, 8, (64, 0), "ep", 64, 2, hidden=256, inter=128)):
        data, layer = Data(case, ranks), case.layer(ranks, traced=True)
        data.load(layer)
        x, ids, weights = args = data.mine()
        before = layer.session.stamps.compare_clocks(timeout_s=30)
        for _ in range(2):
            ranks.meet()
            layer.session.workspace.poison()
            ranks.meet()
            out = layer(*args)
            layer.synchronize()
        assert data.error(out, args) <= BUDGET, f"{case}"
        assert layer.memory.total == layer.session.workspace.allocated_bytes  # the stamps' memory is not the workspace's
        after = layer.session.stamps.compare_clocks(timeout_s=30)
        trace = decode(*layer.session.stamps.read(), rank=ranks.rank)
        workspace = layer.session.workspace
        tables = {name: workspace.local(name).cpu().numpy() for name in TABLES}
        variant = layer._calls.variant_of(len(x))
        check_trace(trace, tables, row_block=variant.row_block, top_k=case.top_k, tokens=len(x),
                    columns=-(-case.hidden // variant.scatter_cols), per_step=FUSED_COLUMN_BLOCK // variant.scatter_cols)
        assert all(offset_of(samples).error_ns < 20_000 for samples in after.values())
        edges = ranks.group.gather(edges_of(trace), timeout_s=30, step="test: edges of the trace")
        if ranks.rank == 0:
            check_sources(edges, {peer: between(offset_of(before[peer]), offset_of(after[peer])) for peer in after})
