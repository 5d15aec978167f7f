"""What must hold for the trace of one call: complete, ordered, and in accord with its tables. No GPU needed; the check on GPUs at
the end does."""

from __future__ import annotations

from collections import Counter

import numpy as np

from moe_tk.trace.kinds import BUILD_BLOCKS, CONSUMERS, LOADER, SPARE, STORERS, kind_number
from moe_tk.trace.model import Laps, RankTrace
from moe_tk.trace.summary import GATHER, OPEN, OPEN_PHASES, SCATTER

TOLERANCE_NS = 2000.0  # a stamp is written a moment after what it tells of; plus a tick of the timer
SLICE_STEP, ENOUGH_ITEMS = 512, 4096  # combine.cuh


def slices_of(items: int, width: int) -> int:
    """Slices of columns that a job of `items` is cut into."""
    return max(1, min(-(-width // SLICE_STEP), ENOUGH_ITEMS // max(items, 1)))


def check_trace(trace: RankTrace, tables: dict[str, np.ndarray], *, row_block: int, top_k: int, hidden: int, tokens: int) -> None:
    """tables: those of TABLES, as the workspace has them. Raises AssertionError."""
    assert trace.lost == 0
    slots, _, jobs, tasks1, tasks2 = (int(count) for count in tables["counts"])
    error = TOLERANCE_NS + trace.clock["timer_period_ns"]
    _check_order(trace.laps)
    _check_open_call(trace.laps)
    for kernel, tasks in ((GATHER, tables["tasks1"][:tasks1]), (SCATTER, tables["tasks2"][:tasks2])):
        _check_tiles(trace.laps.where(trace.laps.kernel == kernel), tasks, kernel == GATHER)
    rows = tables["slot_pair"][:slots] // top_k
    _check_moves(trace.laps.where(trace.laps.kernel == GATHER), tables["delivery_order"][:jobs], rows, row_block, error)
    scatter = trace.laps.where(trace.laps.kernel == SCATTER)
    _check_jobs(scatter, tables["job_order"][:jobs], tables["slots"].reshape(-1, top_k), row_block, slices_of(jobs, hidden), error)
    reduced = Counter(scatter.detail[scatter.kind == kind_number("reduce")].tolist())
    assert reduced == Counter({token: slices_of(tokens, hidden) for token in range(tokens)})


def _check_order(laps: Laps) -> None:
    """No lap of a writer begins before the one before it has ended, and none ends before it begins."""
    lengths = laps.kind != kind_number("row placed")
    laps = laps.where(lengths)
    assert (laps.end >= laps.begin).all()
    lane = (laps.kernel * 4096 + laps.block) * 16 + laps.writer
    same = lane[1:] == lane[:-1]
    assert (laps.begin[1:][same] >= laps.end[:-1][same] - 1.0).all()


def _check_open_call(laps: Laps) -> None:
    mine = laps.where((laps.kernel == OPEN) & (laps.block < BUILD_BLOCKS))
    for block in range(BUILD_BLOCKS):
        assert tuple(mine.kind[mine.block == block]) == OPEN_PHASES, f"block {block}"


def _check_tiles(laps: Laps, tasks: np.ndarray, gated: bool) -> None:
    """Each task is gated, loaded, computed or skipped by each consumer warpgroup, and stored, exactly once."""
    wanted = Counter((tasks[:, 2].astype(np.int64) << 8 | tasks[:, 3]).tolist())
    assert set(wanted.values()) <= {1}

    def tiles(writer: int, *names: str) -> Counter:
        chosen = (laps.writer == writer) & np.isin(laps.kind, [kind_number(name) for name in names])
        return Counter(laps.detail[chosen].tolist())

    assert tiles(LOADER, "load") == wanted
    assert tiles(LOADER, "gate") == (wanted if gated else Counter())
    for consumer, storer in zip(CONSUMERS, STORERS, strict=True):
        assert tiles(consumer, "multiply", "skip") == wanted
        assert tiles(consumer, "emit") == tiles(consumer, "multiply") == tiles(storer, "store")
        assert tiles(storer, "push") == (Counter() if gated else wanted)
    assert tiles(CONSUMERS[0], "multiply") == wanted  # the first rows of a block are never padding


def _check_moves(laps: Laps, delivery_order: np.ndarray, row_of_slot: np.ndarray, row_block: int, error: float) -> None:
    """Each row is moved and placed once, and no gate opens before the rows of its row block are placed."""
    moves = laps.where((laps.kind == kind_number("move row")) & (laps.writer == SPARE))
    assert Counter(moves.detail.tolist()) == Counter(delivery_order.tolist())
    placed = laps.where(laps.kind == kind_number("row placed"))
    assert len(placed) == len(moves)
    placed_at = np.full(int(row_of_slot.max(initial=0)) + 1, np.nan)
    for block in np.unique(moves.block):
        rows = moves.detail[moves.block == block]
        mine = placed.where(placed.block == block)
        assert mine.detail.tolist() == list(range(len(rows)))
        placed_at[rows] = mine.end
    gates = laps.where(laps.kind == kind_number("gate"))
    blocks = row_of_slot.reshape(-1, row_block)
    ready = np.array([_latest(placed_at, rows) for rows in blocks])
    late = ready[gates.detail >> 8] - gates.end
    assert late.max(initial=-np.inf) <= error, f"a gate opened {late.max():.0f} ns before its rows were placed"


def _latest(placed_at: np.ndarray, rows: np.ndarray) -> float:
    return float(placed_at[rows[rows >= 0]].max())


def _check_jobs(laps: Laps, job_order: np.ndarray, slots: np.ndarray, row_block: int, slices: int, error: float) -> None:
    """Each job is combined once per slice, and not before the tiles of its rows were pushed."""
    done = laps.where(laps.kind == kind_number("combine"))
    assert Counter(done.detail.tolist()) == Counter({row: slices for row in job_order.tolist()})
    ready = laps.where(laps.kind == kind_number("wait for job"))
    pushed = laps.where((laps.kind == kind_number("push")) & (laps.writer == STORERS[0]))
    pushed_at = np.full(int((pushed.detail >> 8).max(initial=0)) + 1, -np.inf)
    np.maximum.at(pushed_at, pushed.detail >> 8, pushed.end)
    for row, end in zip(ready.detail.tolist(), ready.end.tolist(), strict=True):
        mine = slots[row][slots[row] >= 0] // row_block
        early = pushed_at[mine].max() - end
        assert early <= error, f"the job of row {row} began {early:.0f} ns before its tiles were pushed"


TABLES = ("counts", "tasks1", "tasks2", "slot_pair", "slots", "delivery_order", "job_order")


def traced_layer(ranks) -> None:
    """On every rank: a traced layer is right, and its trace complete and in order."""
    from moe_tk.trace.clocks import between, offset_of
    from moe_tk.trace.decode import decode
    from tests.cuda.checks import BUDGET, Case, Data

    for case in (Case(512, 8, 64, (512, 300), "ep", 128, hidden=2048, inter=768),
                 Case(512, 4, 16, (512,), "tp", 64, hidden=1024, inter=256), Case(64, 2, 8, (64, 0), "ep", 64, 2, hidden=256, inter=128)):
        data, layer = Data(case, ranks), case.layer(ranks, traced=True)
        data.load(layer)
        x, ids, weights = args = data.mine()
        for _ in range(2):
            ranks.meet()
            layer.session.workspace.poison()
            ranks.meet()
            out = layer(*args)
            layer.synchronize()
        assert data.error(out, args) <= BUDGET, f"{case}"
        assert layer.memory.total == layer.session.workspace.allocated_bytes  # the stamps' memory is not the workspace's
        trace = decode(*layer.session.stamps.read(), rank=ranks.rank)
        workspace = layer.session.workspace
        tables = {name: workspace.local(name).cpu().numpy() for name in TABLES}
        row_block = (64, 128)[layer._calls.choices(len(x))[0]]
        check_trace(trace, tables, row_block=row_block, top_k=case.top_k, hidden=case.hidden, tokens=len(x))
        for samples in layer.session.stamps.compare_clocks(timeout_s=30).values():
            assert between(offset_of(samples), None).error_ns < 20_000
