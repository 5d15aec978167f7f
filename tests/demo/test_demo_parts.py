"""The demo's pure parts: how tokens are cut, results judged, pictures drawn, files written."""

from __future__ import annotations

import io
import json
import math
import multiprocessing

import pytest
import torch
from demo_helpers import pattern_record, rank_record
from hypothesis import given
from hypothesis import strategies as st

from moe_tk.demo.export import write_json
from moe_tk.demo.input import cut, load_input, padded_ids
from moe_tk.demo.overlap import overlap
from moe_tk.demo.picture import draw, progress
from moe_tk.demo.records import Failure
from moe_tk.demo.report import ReportConsole
from moe_tk.demo.results import merge, verdict
from moe_tk.demo.start import _listen, checked
from moe_tk.runtime.launcher import RankFailure

ROLES = ["send", "place", "compute", "combine"]


@given(st.integers(1, 4096), st.integers(1, 8), st.booleans())
def test_cut_gives_every_token_to_one_rank(tokens, world, uneven):
    counts = cut(tokens, world, uneven=uneven)
    assert len(counts) == world and sum(counts) == tokens and min(counts) >= 0
    if uneven and world >= 2:
        assert counts[-1] == 0
    if not uneven:
        assert max(counts) - min(counts) <= 1


def test_uneven_cut_gives_rank_1_half_a_share():
    assert cut(4096, 4, uneven=True) == [1638, 819, 1639, 0]
    assert cut(10, 1, uneven=True) == [10]


def test_padded_ids_puts_each_rank_at_its_stride():
    ids = torch.arange(6).reshape(3, 2)
    assert padded_ids(ids, [1, 0, 2]).tolist() == [[0, 1], [-1, -1], [-1, -1], [-1, -1], [2, 3], [4, 5]]


def test_input_is_what_ships():
    whole = load_input(10)
    assert whole.sizes == {"num_experts": 64, "top_k": 8, "hidden_size": 256, "intermediate_size": 128}
    assert whole.hidden.shape == whole.shipped.shape == (10, 256) and whole.rows(4, 2).ids.tolist() == whole.ids[4:6].tolist()


def test_merge_takes_the_slowest_rank_and_sums_errors():
    slow = pattern_record(seconds=[4.0, 1.0, 1.0], error_squared=3e-6)
    mega = pattern_record(seconds=[1.0, 1.0, 1.0], bytes_dispatched=[0, 5], bytes_combined=[0, 6], wait_s={"gemm1": 1.0},
                          busy_s={"gemm1": 2.0})
    first, second = {"serial": pattern_record(), "mega": mega}, {"serial": slow, "mega": mega}
    serial, fused = merge([rank_record(0, first), rank_record(1, second)])
    assert serial.seconds == [4.0, 3.0, 2.0] and serial.median_s == 3.0 and serial.ratio == 1.0 and serial.bytes_dispatched is None
    assert math.isclose(serial.error, math.sqrt(2e-6)) and serial.passed
    assert math.isclose(fused.ratio, 1 / 3) and fused.bytes_dispatched == [[0, 5], [0, 5]] and fused.wait_s == {"gemm1": 2.0}


@pytest.mark.parametrize(("changes", "words"), [
    ({"error_squared": 2.1e-4}, "over the error budget"), ({"error_squared": float("nan")}, "over the error budget"),
    ({"shipped_error_squared": 1.0}, "over the error budget"), ({"digests": ["a", "b"]}, "repeats differ"),
])
def test_one_bad_rank_fails_the_result(changes, words):
    good, bad = pattern_record(), pattern_record(**changes)
    (result,) = merge([rank_record(0, {"serial": good}), rank_record(1, {"serial": bad})])
    assert not result.passed and words in verdict([result])


def test_picture_of_one_launch():
    trace = [(0, 0, "dispatch", 0, 0, 0, 20), (0, 0, "gemm1", 0, 20, 40, 60), (0, 3, "combine", 0, 0, 75, 76)]
    picture = draw("mega", [trace], ROLES, 0, 100, 10)
    send, place, _, combine = picture.lanes
    assert (send.name, send.letters, send.full[:3]) == ("send", "dd..11    ", [True, True, False])
    assert place.letters == " " * 10
    assert combine.letters == ".......c  " and not any(combine.full)


def test_picture_shows_what_moves_in_moments():
    trace = [(0, 2, "gemm2", 0, 0, 0, 9), (0, 2, "combine", 0, 9, 9, 10), (0, 2, "gemm1", 0, 10, 10, 13),
             (0, 2, "gemm2", 0, 13, 13, 20)]
    lane = draw("mega", [trace], ROLES, 0, 20, 2).lanes[2]
    assert (lane.letters, lane.full) == ("c2", [True, True])


def test_picture_puts_both_launches_of_two_kernel_on_the_same_rows():
    trace = [(0, 2, "gemm1", 0, 0, 0, 40), (1, 0, "gemm2", 0, 60, 60, 90), (1, 1, "combine", 0, 60, 85, 99)]
    lanes = {lane.name: lane.letters for lane in draw("two_kernel", [trace], ROLES, 0, 100, 10).lanes}
    assert lanes == {"send": " " * 10, "place": " " * 10, "compute": "1111  222 ", "combine": "      ..cc"}


def test_progress_is_the_share_that_is_done():
    traces = [[(0, 3, "combine", item, 0, 0, end) for item, end in enumerate((15, 35))], [(0, 3, "combine", 0, 0, 0, 95)]]
    assert progress(traces, "combine", 0, 100, 4) == [1 / 3, 2 / 3, 2 / 3, 1.0]
    assert progress([[]], "combine", 0, 100, 2) == [0.0, 0.0]


def test_overlap_counts_what_moved_while_tiles_were_computed():
    tiles = [(0, 2, "gemm1", 0, 5, 20, 30), (0, 2, "gemm2", 0, 30, 30, 80)]
    moves = [(0, 0, "dispatch", item, 0, 0, end) for item, end in enumerate((10, 19, 25, 40))]
    sent = [(0, 3, "combine", item, 0, 0, end) for item, end in enumerate((50, 70, 79, 90))]
    seen = overlap([tiles + moves + sent, []], 0, 100)
    assert (seen.moved_in, seen.sent_back, seen.half_back) == (0.5, 0.75, 0.7)
    assert overlap([[]], 0, 100).moved_in is None


def test_failure_names_the_first_rank_that_failed():
    failures = [Failure(0, 5.0, "PeerLost: rank 2 died"), rank_record(1, {}), Failure(2, 4.0, "ValueError: x", "Traceback ...")]
    with pytest.raises(RankFailure, match=r"^rank 2 failed: ValueError: x \(1 other rank stopped because of it\)"):
        checked(failures, debug=False)


def test_progress_goes_on_when_nobody_reads_it():
    receive, send = multiprocessing.Pipe(duplex=False)
    for number in range(3):
        send.send(("stage", number))
    send.close()
    seen = []

    def show(stage, done):
        seen.append(done)
        raise BrokenPipeError

    _listen(receive, show)
    assert seen == [0, 1, 2]


def test_reader_that_goes_away_is_no_wrong_result():
    class Gone(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        ReportConsole(file=Gone()).print("text")


def test_json_is_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "out.json"
    write_json(str(path), {"value": float("nan")})
    assert json.loads(path.read_text()) == {"value": "nan"}
    with pytest.raises(TypeError):
        write_json(str(path), {"value": object()})
    assert json.loads(path.read_text()) == {"value": "nan"} and [entry.name for entry in tmp_path.iterdir()] == ["out.json"]
