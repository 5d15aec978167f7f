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
from tests.cuda.trace_checks import COLUMN_GROUPS, check_sources, check_trace, edges_of

REPO = Path(__file__).resolve().parents[2]
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
    for name in ("load", "gate", "store", "push"):
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
    lambda call: without(call, (GATHER, 0, LAST), "gate"),
    lambda call: without(call, (GATHER, 0, LOADER), "gate") or without(call, (GATHER, 0, LOADER), "load weights"),
    lambda call: call.lanes[GATHER, 0, LAST].reverse(),                   # the gate behind the loads
    lambda call: call.lanes[GATHER, 0, LAST].append(call.lanes[GATHER, 1, LAST].pop()),  # its loaders at different tiles
    lambda call: moved(call, (OPEN, 17, 0), "export rows", 20_000),       # tables are there only after GEMM 1 began
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


def test_a_gate_that_opens_before_another_rank_has_sent_its_rows_is_found(tables):
    """The clocks of the ranks differ by a second; rows were sent 5 us after the calls began, gates opened after 16."""
    mine = edges_of(whole(make_call(tables), tables))
    assert mine == (BEGIN_NS + 5_120, BEGIN_NS + 16_000)

    def check(behind: int) -> None:
        """Rank 1 sends so much later, on a clock that is a second ahead."""
        check_sources([mine, tuple(edge + 10**9 + behind for edge in mine)], {1: Offset(-1e9, 700.0)})

    check(0), check(11_000), check(-11_000)
    for behind in (15_000, -15_000):
        with pytest.raises(AssertionError, match=f"a gate of rank {int(behind < 0)} opened"):
            check(behind)
    check_sources([mine, None], {1: Offset(0.0, 0.0)})


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
    assert gather["gate_us"]["p50"] == 0.64 and gather["first_gate_open_us"] == gather["last_gate_open_us"] == 16.0
    lanes = gather["consumers_multiply"] + gather["consumers_emit"] + gather["consumers_wait_for_inputs"]
    assert 0 < lanes < 1 and 0 < gather["loaders_at_gate"] < 0.2
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
                         ("open_close", "close"),
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
