"""Stamps to laps, two clocks to one, and what a whole trace is: on a made-up call."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from made_up import BEGIN_NS, BLOCKS, CAPACITY, COLUMNS2, GHZ, ROW_BLOCK, TOKENS, TOP_K, MadeUp, make_call, make_tables

from moe_tk.errors import MoETkError
from moe_tk.memory.nvlink_layout import FUSED_COLUMN_BLOCK
from moe_tk.runtime import stamps
from moe_tk.trace.clocks import Offset, between, offset_of
from moe_tk.trace.decode import decode
from moe_tk.trace.kinds import BUILD_BLOCKS, GPU_KERNELS, GPU_KINDS, LAST, LOADER, STORERS, WRITERS, kind_number
from moe_tk.trace.model import RankTrace, Trace
from moe_tk.trace.summary import GATHER, OPEN, SCATTER, summarise
from tests.cuda.trace_checks import COLUMN_GROUPS, Edges, check_sources, check_trace, edges_of

REPO = Path(__file__).resolve().parents[2]
WAITS = BLOCKS - 1  # block of the made-up open_call that has sent last
CALL = {"shape": "small", "mode": "ep", "tokens_per_rank": TOKENS, "world": 1, "traced_call_us": 100.0, "gpu": "made up"}


@pytest.fixture(scope="module")
def tables() -> dict[str, np.ndarray]:
    return make_tables()


def whole(call: MadeUp, tables: dict[str, np.ndarray]) -> RankTrace:
    """Decoded and checked."""
    trace = decode(*call.stamps(), rank=0, call=CALL)
    check_trace(trace, tables, row_block=ROW_BLOCK, top_k=TOP_K, tokens=TOKENS, columns=COLUMNS2)
    return trace


def test_laps_come_back_as_they_were_across_a_wrap_of_the_timer(tables):
    call = make_call(tables)
    trace = whole(call, tables)
    assert trace.origin_ns == BEGIN_NS and trace.lost == 0
    assert len(trace.laps) == sum(len(laps) for laps in call.lanes.values())
    for (kernel, block, writer), laps in call.lanes.items():
        mine = trace.laps.where((trace.laps.kernel == kernel) & (trace.laps.block == block) & (trace.laps.writer == writer))
        got = list(zip(mine.kind.tolist(), mine.detail.tolist(), mine.begin.tolist(), mine.end.tolist(), strict=True))
        assert got == laps


def test_a_tile_of_one_warpgroup_has_its_other_roles_in_earlier_warps(tables):
    one, two = (whole(make_call(tables, warpgroups), tables) for warpgroups in (1, 2))
    for name in ("load", "load weights", "gate", "store", "push"):
        found = [{*trace.laps.writer[trace.laps.kind == kind_number(name)].tolist()} for trace in (one, two)]
        assert found[0] == found[1] - {STORERS[1]}, name
    first, second = (summarise(Trace((trace,), CALL))["ranks"][0]["kernels"]["gather_gemm"] for trace in (one, two))
    assert first["consumers_multiply"] > second["consumers_multiply"] and first["loaders_load"] == second["loaders_load"]
    assert first["tiles"] == len(tables["tasks1"])


def test_timer_period_and_rate_of_the_multiprocessors_are_found(tables):
    clock = whole(make_call(tables), tables).clock
    assert clock["timer_period_ns"] == 32
    assert all(abs(clock[f"mhz_{name}"] - GHZ * 1e3) < 1 for name in GPU_KERNELS)


def test_writers_that_did_not_begin_do_not_count(tables):
    call = make_call(tables)
    del call.begun[OPEN, BLOCKS - 1, 0]
    trace = decode(*call.stamps(), rank=0)
    assert not ((trace.laps.kernel == OPEN) & (trace.laps.block == BLOCKS - 1)).any()
    assert len(trace.blocks_begun) == 3 * BLOCKS - 1


def test_laps_beyond_the_room_are_counted(tables):
    call = make_call(tables)
    call.lanes[GATHER, 0, 3] = [(kind_number("combine"), 0, 10_016, 10_048)] * (CAPACITY + 5)
    assert decode(*call.stamps(), rank=0).lost == 5


def test_memory_that_no_stamps_wrote_is_refused(tables):
    headers, records = make_call(tables).stamps()
    records[GATHER, 0, LOADER, 0]["what"] = 200 << 24
    with pytest.raises(MoETkError, match=r"kinds \d+\.\.200, wanted 1\.\."):
        decode(headers, records, rank=0)


def without(call: MadeUp, place: tuple[int, int, int], name: str) -> None:
    laps = call.lanes[place]
    laps.remove(next(lap for lap in laps if lap[0] == kind_number(name)))


def again(call: MadeUp, place: tuple[int, int, int], name: str, kind: str, detail: int | None = None) -> None:
    """Between the first lap of a kind and the one behind it, one of no length; of the same tile or item, if no other is given."""
    laps = call.lanes[place]
    index = next(i for i, lap in enumerate(laps) if lap[0] == kind_number(name))
    _, same, _, end = laps[index]
    laps.insert(index + 1, (kind_number(kind), same if detail is None else detail, end, end))


def swapped(call: MadeUp, place: tuple[int, int, int], name: str) -> None:
    """The first lap of a kind and the one behind it change kinds."""
    laps = call.lanes[place]
    index = next(i for i, lap in enumerate(laps) if lap[0] == kind_number(name))
    laps[index:index + 2] = [(laps[i][0], *laps[j][1:]) for i, j in ((index + 1, index), (index, index + 1))]


def elsewhere(call: MadeUp, place: tuple[int, int, int], name: str) -> None:
    """The first lap of a kind is of the lane's last tile."""
    laps = call.lanes[place]
    index = next(i for i, lap in enumerate(laps) if lap[0] == kind_number(name))
    laps[index] = (laps[index][0], laps[-1][1], *laps[index][2:])


def moved(call: MadeUp, place: tuple[int, int, int], name: str, by: int) -> None:
    """Moves the last lap of a kind, both ends."""
    laps = call.lanes[place]
    index = max(i for i, lap in enumerate(laps) if lap[0] == kind_number(name))
    kind, detail, begin, end = laps[index]
    laps[index] = kind, detail, begin + by, end + by


@pytest.mark.parametrize("change", [
    lambda call: without(call, (OPEN, 3, 0), "place pairs"),
    lambda call: without(call, (GATHER, 0, LOADER), "load"),
    lambda call: without(call, (GATHER, 0, LAST), "load"),
    lambda call: without(call, (GATHER, 0, LAST), "load weights"),
    lambda call: again(call, (GATHER, 0, LOADER), "load weights", "gate"),  # GEMM 1 has none
    lambda call: again(call, (GATHER, 0, LAST), "load", "load weights", call.lanes[GATHER, 0, LAST][-1][1]),  # for the second too
    lambda call: [elsewhere(call, (GATHER, 0, loader), "load weights") for loader in (LOADER, LAST)],  # not of the first tile
    lambda call: swapped(call, (GATHER, 0, LAST), "load weights"),        # the weights behind the load
    lambda call: call.lanes[GATHER, 0, LAST].reverse(),                   # all behind each other the wrong way round
    lambda call: call.lanes[GATHER, 0, LAST].append(call.lanes[GATHER, 1, LAST].pop()),  # its loaders at different tiles
    lambda call: moved(call, (OPEN, 3, 0), "write tasks", 20_000),        # tables are there only after GEMM 1 began
    lambda call: moved(call, (OPEN, WAITS, 0), "wait for rows", 20_000),  # rows are
    lambda call: without(call, (OPEN, WAITS, 0), "wait for rows"),
    lambda call: again(call, (OPEN, 9, 0), "export rows", "wait for rows"),   # two blocks wait
    lambda call: again(call, (OPEN, 3, 0), "write tasks", "wait for rows"),   # so does one that builds
    lambda call: swapped(call, (OPEN, WAITS, 0), "export rows"),          # it waits before it has sent
    lambda call: without(call, (OPEN, 9, 0), "export rows"),
    lambda call: moved(call, (OPEN, 9, 0), "export rows", 6_000),         # it waits before the others have sent
    lambda call: without(call, (GATHER, 1, 0), "multiply"),
    lambda call: without(call, (SCATTER, 0, STORERS[0]), "push"),
    lambda call: without(call, (SCATTER, 0, 0), "combine"),
    lambda call: without(call, (SCATTER, 0, 0), "reduce"),
    lambda call: call.lanes[GATHER, 0, LOADER].append(call.lanes[GATHER, 0, LOADER][-1]),  # a task twice
    lambda call: moved(call, (GATHER, 2, STORERS[0]), "push", 60_000),    # after GEMM 2 loaded it
    lambda call: moved(call, (SCATTER, 2, STORERS[0]), "push", 60_000),   # after its jobs began
    lambda call: moved(call, (SCATTER, 2, 0), "emit", -1_000)])           # before its tile was multiplied
def test_a_trace_that_is_not_whole_or_out_of_order_is_found(tables, change):
    call = make_call(tables)
    change(call)
    with pytest.raises(AssertionError):
        whole(call, tables)


def two_edges(tables, behind: int, waited: int = 8_192) -> list[Edges]:
    """Of two ranks, the second one's clock a second ahead, and all that it does so much later; waited: by the first one."""
    first, second = (edges_of(whole(make_call(tables, waited=at), tables)) for at in (waited, 8_192))
    return [first, Edges(*(edge + 10**9 + behind for edge in second))]


AHEAD = {1: Offset(-1e9, 700.0)}  # known to so many ns


def test_rows_that_are_waited_for_too_short_are_found(tables):
    """Rows were sent 5 us after the calls began, the waits were over after 8, GEMM 1 loaded after 14."""
    mine = two_edges(tables, 0)[0]
    assert mine == (BEGIN_NS + 5_120, BEGIN_NS + 8_192, BEGIN_NS + 14_400)
    for behind in (0, 5_000, -5_000):
        check_sources(two_edges(tables, behind), AHEAD)
    for behind in (6_500, -6_500):
        with pytest.raises(AssertionError, match=f"the wait for rows of rank {int(behind < 0)} came"):
            check_sources(two_edges(tables, behind), AHEAD)
    check_sources(two_edges(tables, 3_000, waited=5_504), AHEAD)
    with pytest.raises(AssertionError, match="the wait for rows of rank 0 came 4616 ns before rank 1 had sent its rows"):
        check_sources(two_edges(tables, 5_000, waited=5_504), AHEAD)  # the first rank did not wait for the second


def test_loads_before_another_rank_has_sent_its_rows_are_found(tables):
    first, second = two_edges(tables, 0)
    for loads in (first.sent - 2_000, None):  # within errors, and without tiles
        check_sources([first._replace(loads=loads), second], AHEAD)
    for edges in ([first._replace(loads=first.sent - 4_000), second], [first, second._replace(loads=second.sent - 4_000)]):
        with pytest.raises(AssertionError, match=f"the first load of rank {int(edges[0] == first)} came 4000 ns before"):
            check_sources(edges, AHEAD)


def test_a_rank_without_tiles_has_sent_and_waited_all_the_same(tables):
    trace = whole(make_call(tables), tables)
    gone = replace(trace, laps=trace.laps.where(trace.laps.kernel != GATHER))
    assert edges_of(gone) == (*edges_of(trace)[:2], None)
    late = edges_of(trace)._replace(sent=BEGIN_NS + 40_000, loads=None)
    with pytest.raises(AssertionError, match="of rank 0 came"):
        check_sources([edges_of(trace), late], {1: Offset(0.0, 0.0)})


def samples(offset: float, *, rounds: int = 50, period: int = 1, drift: float = 0.0) -> np.ndarray:
    """Rounds of 1.4 to 3 us in which the answer is given somewhere inside, on a clock that is `offset` ahead."""
    draw = np.random.default_rng(2)
    before = 10**18 + np.arange(rounds) * 5_000
    there, back = (draw.uniform(700, 1500, rounds) for _ in range(2))
    answer = before + there + offset + drift * np.arange(rounds)
    ns = np.column_stack([before, before + there + back, answer]) // period * period
    return ns.astype(np.int64).view(np.uint64)


@pytest.mark.parametrize("offset", [0, 12_345, -904_496, 3 * 10**9])
@pytest.mark.parametrize("period", [1, 32])
def test_offset_of_two_clocks_is_within_its_error(offset, period):
    found = offset_of(samples(offset, period=period))
    assert abs(found.offset_ns + offset) <= found.error_ns + period + 256  # 256: float64 at 10**18
    assert found.error_ns < 1_100


def test_rounds_that_did_not_happen_do_not_count():
    some = samples(500)
    some[7:] = 0
    assert abs(offset_of(some).offset_ns + 500) < 1_100
    assert offset_of(np.zeros((4, 3), dtype=np.uint64)) is None


def test_clocks_that_drift_have_a_larger_error():
    assert offset_of(samples(0, drift=100.0)).error_ns > offset_of(samples(0)).error_ns


def test_offset_between_two_measurements_covers_both():
    assert between(Offset(100, 5), Offset(120, 7)) == Offset(110, 17)
    assert between(None, Offset(3, 2)) == Offset(3, 2)
    assert between(None, None).error_ns == float("inf")


def two_ranks(tables) -> Trace:
    """The same call on two GPUs, the second one's clock a second ahead, and it began 5 us later."""
    first = whole(make_call(tables), tables)
    second = replace(first, rank=1, origin_ns=first.origin_ns + 10**9 + 5_000, offset_ns=-1e9, offset_error_ns=700.0)
    return Trace((first, second), CALL)


def test_ranks_are_put_on_one_clock(tables):
    trace = two_ranks(tables)
    assert [trace.shift(rank) for rank in trace.ranks] == [0, 5_000]
    one = Trace(trace.ranks[:1], CALL)
    assert trace.begin_ns == 0 and trace.end_ns == one.end_ns + 5_000


def test_summary_of_the_made_up_call(tables):
    summary = summarise(two_ranks(tables))
    first, second = summary["ranks"]
    assert summary["span_us"] == pytest.approx(second["kernels"]["gemm_scatter"]["end_us"])
    opened, gather, scatter = (first["kernels"][name] for name in GPU_KERNELS)
    assert [phase["mean_us"] for phase in opened["phases"].values()] == [1.54] * 6
    assert opened["export"]["mean_us"] == 4.1
    assert first["gaps_us"] == pytest.approx([0.77, scatter["begin_us"] - gather["end_us"]], abs=0.02)
    assert gather["tiles"] == len(tables["tasks1"]) + sum(number % 3 != 0 for number in range(len(tables["tasks1"])))
    assert gather["begin_us"] == 9.98 and gather["first_tile_begins_us"] == 16.32
    assert opened["wait_for_rows"] == {"us": 3.07, "ends_us": 8.19} and opened["end_us"] == 9.22
    assert second["kernels"]["open_call"]["wait_for_rows"] == {"us": 3.07, "ends_us": 13.19}
    assert [rank["kernels"]["gather_gemm"]["first_tile_after_open_us"] for rank in (first, second)] == [7.1, 7.1]
    assert gather["load_weights_us"]["p50"] == 0.96
    assert gather["first_weights_asked_for_us"] == gather["last_weights_asked_for_us"] == 15.36
    lanes = gather["consumers_multiply"] + gather["consumers_emit"] + gather["consumers_wait_for_inputs"]
    assert 0 < lanes < 1 and "loaders_at_gate" not in gather and not any("gate" in name for name in gather)
    gated = 18 * 640 / (18 * 1e3 * scatter["span_us"])  # each block once
    assert scatter["loaders_at_gate"] == pytest.approx(gated, abs=1e-4) and gated > 0.01
    assert scatter["jobs"]["first_ready_us"] == 90.34 and scatter["jobs"]["done_before_last_tile"] == 0
    assert scatter["after_last_tile_us"] == pytest.approx(scatter["end_us"] - scatter["last_consumer_ends_us"])


def test_numbers_here_are_those_of_the_header():
    """stamps.cuh and its readers name the same kinds in the same order."""
    text = (REPO / "tk_kernels/platform/stamps.cuh").read_text()
    body = re.sub(r"//.*", "", re.search(r"enum class stamp_kind[^{]*\{(.*?)\};", text, re.DOTALL).group(1))
    names = [name.strip() for name in body.split(",")]
    assert len(names) == len(GPU_KINDS) and names[0] == "none"
    where = {name: index for index, name in enumerate(names)}
    for native, ours in (("launch_wait", "wait for launch"), ("open_send", "send routing"), ("open_tasks", "write tasks"),
                         ("open_zero", "zero counters"), ("open_export", "export rows"), ("open_rows", "wait for rows"),
                         ("load_ahead", "load weights"), ("gate", "gate"),
                         ("load", "load"), ("multiply", "multiply"), ("skip", "skip"), ("push", "push"),
                         ("combine_wait", "wait for jobs"), ("combine", "combine"), ("reduce", "reduce")):
        assert where[native] == kind_number(ours), native
    assert re.search(r"STAMP_KERNELS = 3, STAMP_WRITERS = 12", text)
    assert (stamps.KERNELS, stamps.WRITERS, WRITERS) == (3, 12, 12)
    column_work = (REPO / "tk_kernels/nvlink/column_work.hpp").read_text()
    assert re.search(rf"MAX_COL_GROUPS = {COLUMN_GROUPS};", column_work)
    assert re.search(rf"GROUP_COLS = {FUSED_COLUMN_BLOCK};", column_work)  # traced_layer counts column blocks of this width
    assert re.search(rf"OPEN_CLUSTER = {BUILD_BLOCKS};", (REPO / "tk_kernels/nvlink/tables.cuh").read_text())
