"""What a failed call says: the error, the refusal afterwards, the record on disk, and the graph of who waits for whom."""

from __future__ import annotations

import itertools
import json
import os
import re
import time

import pytest
import torch
from fault_lab import (
    FAILED,
    STRUCK,
    Board,
    arm,
    checked_call,
    failure_of,
    go_on_when_given_up,
    inputs,
    make_layer,
    play,
    routed_to,
    run_ranks,
    set_limit,
    values,
)
from fault_scenarios import Scenario

import moe_tk
from moe_tk.cli.explain_timeout import graph_lines
from moe_tk.cli.main import main
from moe_tk.config import env
from moe_tk.runtime.faults import error_from, roots
from moe_tk.runtime.records import read_records, write_records

WAIT = re.compile(r"rank (\d+) waited (\d+\.\d\d) s for (ranks? [\d, ]+|its own blocks) \(phase (\w+), role (\w+)(, [\w ]+ \d+)?, "
                  r"\d+ wanted, \d+ seen\)")


@pytest.mark.parametrize("action", ["raise", "exit"])
@pytest.mark.parametrize(("world", "pattern", "mode"), [(3, "mega", "ep"), (2, "two_kernel", "tp")])
def test_raising_between_exchange_and_launch(tmp_path, action, world, pattern, mode):
    """The rank's own exception is what it sees; the others stop at once, poisoned, and all that live can rebuild."""
    verdict = play(Scenario(world=world, pattern=pattern, mode=mode, action=action), tmp_path)
    assert verdict.problems == []


def raise_before_the_call(rank: int, world: int, board_path: str) -> tuple[str, str, str, list[str]]:
    layer, wrong = make_layer(), []
    checked_call(layer, inputs(rank, 0), wrong)
    set_limit(layer, 0.8)

    def call() -> None:
        if rank == 1:
            raise KeyError("the model's own error")
        layer(*inputs(rank, 1))
    kind, text, _ = failure_of(call)
    time.sleep(1.6)  # all live: this is a time-out, not a death
    refusal = failure_of(lambda: layer(*inputs(rank, 2)))[1] if rank != 1 else ""
    again = make_layer(timeout_s=20.0)  # all ranks are there: the same group can have a new layer
    checked_call(again, inputs(rank, 3), wrong)
    return kind, text, refusal, wrong


def test_raising_before_the_call_and_a_new_layer_in_the_same_group(tmp_path):
    said = values(run_ranks(3, raise_before_the_call, folder=tmp_path))
    assert said.pop(1)[:2] == ("KeyError", "\"the model's own error\"")
    for kind, text, refusal, wrong in said:
        assert (kind, wrong) == ("ProtocolTimeout", []) and "missing rank 1." in text
        assert "unusable since an earlier call failed" in refusal and "missing rank 1." in refusal


def chain(rank: int, world: int, board_path: str) -> tuple[str, str]:
    """Rank 0 waits for rank 1, rank 1 for rank 2, rank 2 is stopped while it sends; rank 3 needs nobody."""
    board, wrong = Board(board_path, world), []
    layer = make_layer(compute_blocks=4)
    checked_call(layer, inputs(rank, 0), wrong)
    set_limit(layer, 1.0)
    if rank == 2:
        arm("stop", "dispatch", 1, seconds=0, stamp=board.address(rank, STRUCK))
    arguments = routed_to(3 if rank == 3 else 1, world, tokens=0 if rank == 1 else 24)  # 48 rows: one row block is of both
    kind, text, _ = failure_of(lambda: layer(*arguments))
    if rank == 3 and not kind:  # its own call may be over before the others give up
        kind, text, _ = failure_of(lambda: layer(*arguments))
    board.stamp(rank, FAILED)
    time.sleep(0.5)  # the stopped rank shall see time-outs, not ends
    return kind, text


def test_krn_09_the_root_of_a_chain_is_named(tmp_path, capsys):
    said = values(run_ranks(4, chain, folder=tmp_path, outside=lambda board, ranks: go_on_when_given_up(board, ranks, 2)))
    for rank, (kind, text) in enumerate(said):
        assert kind == "ProtocolTimeout", text
        if rank != 2:
            assert "moe_layer: missing rank 2." in text, text
    text = said[0][1]
    assert "raise timeout_s (now 1) or MOE_TK_TIMEOUT_S" in text  # a next step
    waits = {int(rank): (float(seconds), whom, phase) for rank, seconds, whom, phase, *_ in WAIT.findall(text)}
    assert waits[0][1:] == ("rank 1", "reduce") and waits[1][1:] == ("rank 2", "dispatch")
    assert max(waits[0][0], waits[1][0]) >= 0.95

    path = re.search(r"moe_tk explain-timeout (\S+)", text).group(1)
    content = json.loads(open(path).read())
    assert (content["op"], content["rank"], content["world"]) == ("moe_layer", 0, 4)
    assert main(["explain-timeout", path]) == 0
    lines = " ".join(capsys.readouterr().out.split())
    assert re.search(r"rank 0 --\[ phase reduce, role reduce, chunk 0, [\d.]+ s \]--> rank 1", lines), lines
    assert re.search(r"rank 1 --\[ phase dispatch, role place, chunk 0, [\d.]+ s \]--> rank 2", lines), lines
    assert "rank 2 <== start here: left no record" in lines
    assert lines.count("start here") == 1
    assert "moe_layer: missing rank 2." in lines


def wait_for_many(rank: int, world: int, board_path: str) -> tuple[str, list[dict]]:
    """Ranks 0 and 1 wait for each other's results, in other blocks for rows of rank 2, which the results depend on."""
    board, wrong = Board(board_path, world), []
    layer = make_layer(compute_blocks=16)
    checked_call(layer, inputs(rank, 0, tokens=8), wrong)
    set_limit(layer, 0.7)
    if rank == 2:
        arm("stop", "dispatch", 1, seconds=0, stamp=board.address(rank, STRUCK))
    arguments = routed_to(0 if rank == 1 else 1, world, tokens=2)
    if rank == 2:
        arguments[1][:, 1] = 0  # an expert of rank 1 and one of rank 0
    try:
        layer(*arguments)
    except moe_tk.ProtocolTimeout as error:
        board.stamp(rank, FAILED)
        time.sleep(0.5)
        return str(error), error.records
    return "", []


def test_krn_09_a_record_names_all_ranks_that_any_block_waits_for(tmp_path):
    """One block per rank spoke for all once, and two ranks whose blocks had spoken of each other hid the one that both needed."""
    said = values(run_ranks(3, wait_for_many, folder=tmp_path, outside=lambda board, ranks: go_on_when_given_up(board, ranks, 2)))
    for text, records in said[:2]:
        assert "missing rank 2." in text
        assert {r["rank"]: r["missing"] for r in records} == {0: [1, 2], 1: [0, 2]}


def record(rank: int, missing: list[int], kind: str = "told_by_peer", seconds: float = 1.0, producer: int = -1) -> dict:
    return {"rank": rank, "op": "moe_layer", "phase": "reduce", "role": "reduce", "block": 0, "slot": 0, "producer": producer,
            "expected": 2, "seen": 1, "kind": kind, "epoch": 2, "seconds": seconds, "missing": missing}


@pytest.mark.parametrize(("records", "dead", "wanted"), [
    ([record(0, [1], "timeout"), record(1, [2])], set(), [2]),                              # a chain
    ([record(0, [1, 3], "timeout"), record(1, [0, 3]), record(2, [])], set(), [3]),         # two wait for each other and for 3
    ([record(0, [1, 2], "timeout"), record(1, [])], set(), [2]),                            # 1 was at work when it was told
    ([record(0, [1], "timeout"), record(1, [], "timeout")], set(), [1]),                    # 1 waited for its own blocks
    ([record(0, [1], "timeout"), record(1, [0], seconds=0.0)], set(), [1]),                 # 1 was stopped, and found 0 gone
    ([record(0, [1, 2], "peer_lost", producer=2), record(1, [0])], {2}, [2]),               # 2 died
    ([record(0, [1], "told_by_peer"), record(1, [2], "peer_lost", producer=2)], set(), [2]),  # only 1 saw that 2 died
    ([record(0, [1], "timeout"), record(1, [2])], {0, 1}, [2]),                             # 0 and 1 gave up before they ended
    ([record(0, [1]), record(1, [], "host")], {1}, [1]),                                    # 1 raised, then ended
    ([], set(), []),
])
def test_roots(records, dead, wanted):
    for order in itertools.permutations(records):
        assert roots(list(order), dead) == wanted
        error = error_from(list(order), op="moe_layer", rank=0, dead=dead, timeout_s=1.0)
        died = any(r["kind"] == "peer_lost" for r in order)
        assert isinstance(error, moe_tk.PeerLost) == died
        if wanted:
            assert re.search(rf"moe_layer: (missing )?rank {wanted[0]}( died|\.| raised)", str(error)), error


def test_a_rank_without_a_next_step_is_shown_as_such(tmp_path):
    records = [record(0, [1, 2, 3], "timeout"), record(1, []), record(2, [], "host")]
    path = write_records(records, op="moe_layer", rank=0, world=4, dead=[], message="")
    lines = graph_lines(read_records(path))
    assert "--> rank 1, rank 2, rank 3" in lines[0] and "at work" in lines[1] and "left no record" in lines[3]
    assert "start here: raised an exception" in lines[2] and sum("start here" in line for line in lines) == 1


def test_the_graph_of_a_death_and_of_a_rank_that_was_stopped(tmp_path):
    records = [record(0, [1, 2], "peer_lost", producer=1), record(2, [0])]
    lines = graph_lines(read_records(write_records(records, op="moe_layer", rank=0, world=3, dead=[1, 2], message="")))
    assert "rank 1 <== start here: its process died" in lines and sum("start here" in line for line in lines) == 1
    records = [record(0, [1], "timeout"), record(1, [0], seconds=0.2)]  # as rank 1 sees it when it is continued
    lines = graph_lines(read_records(write_records(records, op="moe_layer", rank=1, world=2, dead=[0], message="")))
    assert "start here: it came to this wait when" in lines[1] and "start here" not in lines[0]


def test_each_failure_of_a_process_has_its_own_record(tmp_path):
    paths = {write_records([record(0, [1])], op=op, rank=0, world=2, dead=[], message=op) for op in ("ag_gemm", "gemm_rs")}
    assert len(paths) == 2 and {read_records(path)["op"] for path in paths} == {"ag_gemm", "gemm_rs"}


def test_a_record_that_cannot_be_written_hides_nothing(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MOE_TK_RECORD_DIR", str(tmp_path / "file"))
    assert write_records([], op="moe_layer", rank=0, world=2, dead=[], message="") is None


WHOLE = {"version": 1, "op": "moe_layer", "rank": 0, "world": 2, "dead": [], "message": "m", "time": "t",
         "records": [record(0, [1])]}
GARBAGE = {
    "empty": b"", "binary": bytes(range(256)), "text": b"hello", "list": b"[1]", "number": b"7", "deep": b"[" * 100_000,
    "other json": b'{"version": 2, "records": []}', "no records": b'{"version": 1}', "null": b"null",
    "half": json.dumps(WHOLE).encode()[:150],
    **{f"{key} is {value!r}": json.dumps({**WHOLE, key: value}).encode() for key, value in (
        ("records", 5), ("records", [5]), ("records", [{}]), ("world", "2"), ("world", 10**9), ("dead", 3), ("dead", ["x"]),
        ("op", None), ("message", 3), ("records", [{**record(0, [1]), "missing": 1}]),
        ("records", [{**record(0, [1]), "seconds": "x"}]),
        ("records", [{**record(0, [1]), "rank": 9}]), ("records", [{**record(0, [1]), "missing": [9]}]))},
}


@pytest.mark.parametrize("name", GARBAGE)
def test_garbage_is_one_sentence(tmp_path, capsys, name):
    path = tmp_path / "record.json"
    path.write_bytes(GARBAGE[name])
    assert main(["explain-timeout", str(path)]) == 1
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1 and "record.json" in said.err and "wait record" in said.err


@pytest.mark.parametrize("path", ["nothing.json", ".", "a\0b"])
def test_no_file_is_one_sentence(tmp_path, monkeypatch, capsys, path):
    monkeypatch.chdir(tmp_path)
    assert main(["explain-timeout", path]) == 1
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1 and "wait record" in said.err


def test_a_whole_record_is_drawn(tmp_path, capsys):
    path = tmp_path / "record.json"
    path.write_text(json.dumps(WHOLE))
    assert main(["explain-timeout", str(path)]) == 0
    assert "rank 0 --[ phase reduce, role reduce, chunk 0, 1.00 s ]--> rank 1" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["MOE_TK_TIMEOUT_S", "MOE_TK_FIRST_CALL_TIMEOUT_S"])
@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "10s", "1e999"])
def test_a_limit_in_the_environment_is_checked(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    with pytest.raises(moe_tk.ArgumentError, match=rf"{name}='{value}' is not valid: wanted seconds > 0"):
        env(name)


def pass_limits(rank: int, world: int, board_path: str) -> tuple[list[tuple[str, str]], list[float]]:
    x = torch.zeros(4, 8)
    refused = []
    calls = (make_layer, lambda **limit: moe_tk.ops.ag_gemm(x, x, **limit), lambda **limit: moe_tk.ops.gemm_rs(x, x, **limit))
    for value in (0, -1.0, float("nan"), float("inf"), "1", True, [1]):
        for call in calls:
            refused.append(failure_of(lambda call=call, value=value: call(timeout_s=value))[:2])
    taken = [make_layer(timeout_s=None).timeout_s]
    os.environ["MOE_TK_TIMEOUT_S"] = "2.5"
    return refused, [*taken, make_layer(timeout_s=None).timeout_s, make_layer(timeout_s=4).timeout_s]


def test_a_limit_that_is_passed_is_checked_and_goes_before_the_environment(tmp_path):
    refused, taken = values(run_ranks(1, pass_limits, folder=tmp_path))[0]
    for kind, text in refused:
        assert kind in ("ArgumentError", "ArgumentTypeError") and re.search("timeout_s is .*, wanted seconds > 0", text), text
    assert taken == [10.0, 2.5, 4.0]


def wait_with_huge_limit(rank: int, world: int, board_path: str) -> list[str]:
    wrong: list[str] = []
    for call, limit in enumerate((1.8446744073e10, 1e12, 1e300)):
        layer = make_layer(timeout_s=limit)
        if rank == call % 2:  # the other then waits for this rank, and in other blocks for its own: both limits count
            arm("delay", "dispatch", 1, seconds=0.9, stamp=0)
        checked_call(layer, inputs(rank, call), wrong, name=f"limit {limit}")
    return wrong


def test_a_huge_limit_is_long(tmp_path):
    """Nanoseconds in 64 bits are 584 years: more must not wrap around to a short limit."""
    assert values(run_ranks(2, wait_with_huge_limit, folder=tmp_path)) == [[], []]


def test_out_of_a_failed_call_is_documented():
    assert "undefined" in moe_tk.MoELayer.__call__.__doc__
