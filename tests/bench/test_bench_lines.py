"""A line with contenders that are right, wrong, raise, or stop halfway: nobody's failure is anybody else's."""

from __future__ import annotations

import importlib
import sys
import types
import weakref
from pathlib import Path

import pytest
import torch
from bench_helpers import options

from moe_tk.bench.contender import Call, NotAvailable
from moe_tk.bench.lines import Result, measure_line
from moe_tk.bench.problem import Problem
from moe_tk.bench.ranks import Ranks
from moe_tk.bench.rivals import make_rival
from moe_tk.bench.run import compare
from moe_tk.bench.shapes import Shape
from moe_tk.bench.timing import CpuClock

SHAPE = Shape("small", 64, 32, 6, 2)


class Fake:
    """Gives `answer` for a result."""

    def __init__(self, name, answer, ours=False, fail_at=None):
        self.name, self.answer, self.ours, self.fail_at, self.runs = name, answer, ours, fail_at, 0

    def prepare(self, batch):
        if self.fail_at == "prepare":
            raise RuntimeError("no memory\nfor this")
        out = torch.zeros_like(batch.hidden)

        def run():
            self.runs += 1
            if self.fail_at == self.runs:
                raise RuntimeError("gave up")
            out.copy_(self.answer)

        return Call(run, out)

    def finish(self):
        pass


@pytest.fixture
def setting():
    device = torch.device("cpu")
    problem = Problem(SHAPE, "ep", world=1, rank=0, device=device)
    batch = problem.batch("uniform", 20)
    ranks = Ranks(device)
    return problem, batch, problem.sample(batch), ranks


def run(contenders, setting, *words):
    _, batch, sample, ranks = setting
    results = {contender.name: Result(contender.name, contender.ours, against=not contender.ours) for contender in contenders}
    measure_line(contenders, results, batch, sample, ranks=ranks, options=options("--rounds", "2", *words), dtype="bf16",
                 clock=CpuClock(ranks.meet))
    return results


def right_answer(setting):
    problem, batch, sample, _ = setting
    answer = torch.full_like(batch.hidden, float("nan"))
    answer[sample.rows] = sample.want.bfloat16()
    return answer


def test_the_right_one_is_timed(setting):
    found = run([Fake("good", right_answer(setting), ours=True)], setting, "--sustained", "0.01")["good"]
    assert found.state == "ok" and found.error < 0.005
    assert found.best == found.us["eager"]["median"] > 0 and found.us["sustained"]["median"] > 0


def test_wrong_and_nan_results_are_not_timed(setting):
    good = right_answer(setting)
    found = run([Fake("wrong", good * 1.5), Fake("nan", torch.full_like(good, float("nan"))), Fake("good", good)], setting)
    assert found["wrong"].state == found["nan"].state == "failed" and not found["wrong"].us
    assert "wrong result" in found["wrong"].why and found["nan"].to_dict()["error"] is None
    assert found["good"].state == "ok"


@pytest.mark.parametrize(("fail_at", "said"), [("prepare", "RuntimeError: no memory"), (1, "RuntimeError: gave up")])
def test_who_raises_is_out_alone(setting, fail_at, said):
    good = right_answer(setting)
    found = run([Fake("bad", good, fail_at=fail_at), Fake("good", good)], setting)
    assert found["bad"].state == "failed" and found["bad"].why == said
    assert found["good"].state == "ok" and found["good"].us


def test_who_is_wrong_only_while_it_is_timed_is_found_out(setting):
    good = right_answer(setting)

    class Lazy(Fake):
        def prepare(self, batch):
            call = super().prepare(batch)
            return Call(lambda: call.run() if self.runs < 1 else None, call.result)

    found = run([Lazy("lazy", good), Fake("good", good)], setting)
    assert found["lazy"].state == "failed" and "after timing" in found["lazy"].why and found["good"].state == "ok"


def test_what_a_graph_reads_and_writes_lives_as_long_as_it(setting, monkeypatch):
    """A CUDA graph holds no tensors: had the buffers of an earlier contender gone, its replays would write into other memory."""
    good, alive = right_answer(setting), []

    class Tensors(Fake):
        def prepare(self, batch):
            call = super().prepare(batch)
            alive.append(weakref.ref(call.result))
            return call

    def capture(run, calls):
        number = len(alive) - 1

        def replay():
            assert alive[number]() is not None
            alive[number]().copy_(good)

        return types.SimpleNamespace(replay=replay)

    monkeypatch.setattr("moe_tk.bench.lines.capture", capture)
    setting[3].device = types.SimpleNamespace(type="cuda")
    found = run([Tensors("first", good), Tensors("second", good)], setting)
    for name in ("first", "second"):
        assert found[name].state == "ok" and found[name].us["graph"]["rounds"] == 2, found[name].why


@pytest.mark.parametrize("mode", ["ep", "tp"])
@pytest.mark.parametrize("routing", ["uniform", "hot:1", "zipf"])
def test_the_torch_rival_is_right(mode, routing):
    problem = Problem(SHAPE, mode, world=1, rank=0, device=torch.device("cpu"))
    batch = problem.batch(routing, 33)
    call = make_rival("torch", problem, Ranks(problem.device)).prepare(batch)
    call.run()
    error, norm = problem.sample(batch).squares(call.result)
    assert error**0.5 <= 0.01 * norm**0.5


def test_aligned_rows_for_deepgemm(monkeypatch):
    """A stand-in for the library that multiplies block by block, each block with the expert of its first row."""
    def multiply(a, b, d, experts):
        assert a.shape[0] % 16 == 0 and experts.shape == (a.shape[0],)
        for first in range(0, a.shape[0], 16):
            assert len(set(experts[first:first + 16].tolist())) == 1
            d[first:first + 16] = a[first:first + 16] @ b[int(experts[first])].T

    library = types.ModuleType("deep_gemm")
    library.m_grouped_bf16_gemm_nt_contiguous = multiply
    library.get_mk_alignment_for_contiguous_layout = lambda: 16
    monkeypatch.setitem(sys.modules, "deep_gemm", library)
    problem = Problem(SHAPE, "ep", world=1, rank=0, device=torch.device("cpu"))
    batch = problem.batch("zipf", 45)
    call = make_rival("deepgemm", problem, Ranks(problem.device)).prepare(batch)
    call.run()
    error, norm = problem.sample(batch).squares(call.result)
    assert error**0.5 <= 0.01 * norm**0.5


@pytest.fixture
def flashinfer(monkeypatch):
    """The stand-in, freshly imported."""
    monkeypatch.syspath_prepend(Path(__file__).parent / "stand_in")
    for name in [name for name in sys.modules if name.partition(".")[0] == "flashinfer"]:
        monkeypatch.delitem(sys.modules, name)
    yield importlib.import_module("flashinfer")
    for name in [name for name in sys.modules if name.partition(".")[0] == "flashinfer"]:
        del sys.modules[name]


@pytest.mark.parametrize("mode", ["ep", "tp"])
@pytest.mark.parametrize("routing", ["uniform", "hot:1", "zipf"])
def test_flashinfer_is_given_what_it_wants_and_tuned_for_the_rows_of_the_call(flashinfer, mode, routing):
    problem = Problem(SHAPE, mode, world=1, rank=0, device=torch.device("cpu"))
    batch = problem.batch(routing, 33)
    call = make_rival("flashinfer", problem, Ranks(problem.device)).prepare(batch)
    assert flashinfer.fused_moe.TUNED == {(33, 33)} and torch.isnan(call.result).all()
    call.run()
    error, norm = problem.sample(batch).squares(call.result)
    assert error**0.5 <= 0.01 * norm**0.5


def test_flashinfer_without_a_workspace_of_ours(flashinfer, monkeypatch):
    monkeypatch.delattr(flashinfer.fused_moe, "cutlass_fused_moe_workspace_size")
    problem = Problem(SHAPE, "ep", world=1, rank=0, device=torch.device("cpu"))
    batch = problem.batch("uniform", 9)
    call = make_rival("flashinfer", problem, Ranks(problem.device)).prepare(batch)
    call.run()
    error, norm = problem.sample(batch).squares(call.result)
    assert error**0.5 <= 0.01 * norm**0.5


@pytest.mark.parametrize(("shape", "mode", "world", "said"), [
    (SHAPE, "ep", 4, "6 on 4 ranks"), (SHAPE, "tp", 8, "I of a rank is 4"),
    (Shape("few", 64, 2, 6, 2), "tp", 4, "I of a rank is 0")])
def test_what_flashinfer_cannot_split_is_not_available(flashinfer, shape, mode, world, said):
    problem = Problem(shape, mode, world=world, rank=world - 1, device=torch.device("cpu"))
    with pytest.raises(NotAvailable, match=said):
        make_rival("flashinfer", problem, None)


def test_flashinfer_that_is_missing_old_or_without_a_gpu_is_not_available(flashinfer, monkeypatch):
    problem = Problem(SHAPE, "ep", world=1, rank=0, device=torch.device("cpu"))

    def refuse(device):
        raise ValueError("device must be a cuda device")

    monkeypatch.setattr(flashinfer.utils, "get_compute_capability", refuse)
    with pytest.raises(NotAvailable, match="cuda device"):
        make_rival("flashinfer", problem, None)
    monkeypatch.delattr(flashinfer.fused_moe, "cutlass_fused_moe")
    with pytest.raises(NotAvailable, match="no cutlass_fused_moe"):
        make_rival("flashinfer", problem, None)
    monkeypatch.setitem(sys.modules, "flashinfer.fused_moe", None)
    with pytest.raises(NotAvailable, match="not installed"):
        make_rival("flashinfer", problem, None)


def test_weights_of_ranks_are_parts_of_the_same_experts():
    whole = [Problem(SHAPE, "ep", world=1, rank=0, device=torch.device("cpu")).expert(index) for index in range(6)]
    for mode in ("ep", "tp"):
        for rank in range(2):
            problem = Problem(SHAPE, mode, world=2, rank=rank, device=torch.device("cpu"))
            w13, w2 = problem.local_weights()
            for local in range(problem.num_local):
                both, second = whole[problem.first_expert + local]
                columns = slice(problem.first_column, problem.first_column + problem.inter)
                assert torch.equal(w13[local], torch.cat([both[:32][columns], both[32:][columns]]))
                assert torch.equal(w2[local], second[:, columns])


def test_the_best_of_ours_and_of_the_rivals():
    def contender(name, ours, against=None, **us):
        return {"name": name, "ours": ours, "against": not ours if against is None else against,
                "us": {kind: {"median": value} for kind, value in us.items()}}

    line = {"floor": {"us": 50.0}, "contenders": [
        contender("fused", True, graph=100.0, eager=500.0), contender("plain", True, eager=90.0), contender("gone", False),
        contender("slow", False, graph=120.0), contender("fast", False, graph=75.0)]}
    found = compare(line)
    assert found["ours"] == {"name": "plain", "us": 90.0} and found["best_rival"] == {"name": "fast", "us": 75.0}
    assert found["to_floor"] == 1.8 and found["to_rival"] == 1.2
    assert compare(line | {"contenders": line["contenders"][:1]})["to_rival"] is None
    baseline = compare(line | {"contenders": [*line["contenders"], contender("serial", True, against=True, graph=60.0)]})
    assert baseline["ours"] == found["ours"] and baseline["best_rival"] == {"name": "serial", "us": 60.0}
    assert baseline["to_rival"] == 1.5
