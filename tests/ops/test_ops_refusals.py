"""Wrong, different and missing calls of the ops: the same news on all ranks, and a way on."""

from __future__ import annotations

import pytest
import torch
from ops_ranks import absent, calls_by_name, differing, refused, stops_in_data_session

from moe_tk.errors import ArgumentError, ArgumentTypeError

NAN = float("nan")
X, IDS, W = torch.ones(4, 16), torch.zeros(4, 2, dtype=torch.int32), torch.ones(4, 2)
# (op, changed arguments, class, what the message must say); right calls are in ops_ranks.calls_by_name
BAD = [
    ("ag_gemm", dict(x=X.double()), ArgumentTypeError, "x has dtype float64, wanted bfloat16 or float32"),
    ("ag_gemm", dict(x=torch.ones(4, 17)), ArgumentError,
     "x.size(1) is 17, wanted a multiple of 8 (rows are moved in units of 16 bytes); "
     "the nearest valid values are 16 and 24"),
    ("ag_gemm", dict(x=torch.ones(4)), ArgumentError, "x has shape [4], wanted [T, H] = [any, any]"),
    ("ag_gemm", dict(weight=torch.ones(3, 24)), ArgumentError, "weight has shape [3, 24], wanted [N, H] = [any, 16]"),
    ("ag_gemm", dict(weight=torch.ones(0, 16)), ArgumentError, "weight.size(0) is 0, wanted an integer >= 1"),
    ("ag_gemm", dict(weight=torch.ones(3, 16).bfloat16()), ArgumentTypeError, "weight has dtype bfloat16, wanted float32"),
    ("ag_gemm", dict(weight="w"), ArgumentTypeError, "weight must be a tensor [N, H], got str"),
    ("ag_gemm", dict(timeout_s=-1), ArgumentError, "timeout_s is -1, wanted seconds > 0"),
    ("ag_gemm", dict(timeout_s="1"), ArgumentTypeError, "timeout_s is '1' (str), wanted seconds > 0"),
    ("ag_gemm", dict(x=X.clone().requires_grad_()), ArgumentError,
     "x has requires_grad=True, but moe_tk has the forward pass only"),
    ("gemm_rs", dict(x=torch.ones(13, 5)), ArgumentError,
     "x has 13 rows, wanted a multiple of world=3; the nearest valid numbers are 12 and 15"),
    ("gemm_rs", dict(weight=torch.ones(12, 5)), ArgumentError, "weight.size(0) is 12, wanted a multiple of 8"),
    ("gemm_rs", dict(x=torch.ones(12, 0), weight=torch.ones(16, 0)), ArgumentError, "x.size(1) is 0, wanted an integer >= 1"),
    ("dispatch_gemm", dict(topk_ids=IDS.float()), ArgumentTypeError, "topk_ids has dtype float32, wanted int32 or int64"),
    ("dispatch_gemm", dict(topk_ids=IDS[:3]), ArgumentError, "topk_ids has shape [3, 2], wanted [T, k] = [4, 2]"),
    ("dispatch_gemm", dict(topk_ids=torch.zeros(4, 0, dtype=torch.int32)), ArgumentError,
     "topk_ids.size(1) is 0, wanted an integer 1..6"),
    ("dispatch_gemm", dict(topk_ids=torch.zeros(4, 7, dtype=torch.int32)), ArgumentError,
     "topk_ids.size(1) is 7, wanted an integer 1..6"),
    ("dispatch_gemm", dict(topk_weights=torch.full((4, 2), NAN)), ArgumentError, "topk_weights[0, 0] is nan on rank 1"),
    ("dispatch_gemm", dict(num_experts=0), ArgumentError, "num_experts is 0, wanted an integer >= 1"),
    ("dispatch_gemm", dict(mode="dp"), ArgumentError, "mode must be one of ep, tp, got 'dp'"),
    ("dispatch_gemm", dict(tokens_per_rank=-1), ArgumentError, "tokens_per_rank is -1, wanted an integer >= 0"),
    ("dispatch_gemm", dict(activation="relu"), ArgumentError, "activation is 'relu', wanted one of swiglu, gpt_oss"),
    ("dispatch_gemm", dict(swiglu_limit=-2.0), ArgumentError, "swiglu_limit is -2.0, wanted a number > 0"),
    ("dispatch_gemm", dict(w13=torch.ones(2, 7, 16)), ArgumentError, "w13 has 7 rows per expert, wanted an even number >= 2"),
    ("dispatch_gemm", dict(w13=torch.ones(3, 8, 16)), ArgumentError,
     "w13 has shape [3, 8, 16], wanted [E_local, 2I, H] = [2, any, 16]"),
    ("gemm_combine", dict(activated=torch.ones(64, 4)), ArgumentError,
     "activated has 64 rows, wanted at least 96: the output of dispatch_gemm"),
    ("gemm_combine", dict(topk_ids=[[0, 1]]), ArgumentTypeError, "topk_ids must be a tensor [T, k], got list"),
    ("gemm_combine", dict(w2=torch.ones(2, 12, 4)), ArgumentError, "w2.size(1) is 12, wanted a multiple of 8"),
    ("gemm_combine", dict(w2=torch.ones(2, 16, 5)), ArgumentError, "w2 has shape [2, 16, 5], wanted [E_local, H, I] = [2, any, 4]"),
    ("mega_moe", dict(weight_position="last"), ArgumentError, "weight_position is 'last', wanted one of before_l2, combine"),
    ("mega_moe", dict(w2=torch.ones(2, 24, 4)), ArgumentError, "w2 has shape [2, 24, 4], wanted [E_local, H, I] = [2, 16, 4]"),
    ("mega_moe", dict(topk_ids=W, topk_weights=IDS), ArgumentTypeError, "are they swapped?"),
    ("mega_moe", dict(hidden_states=X.half()), ArgumentTypeError, "hidden_states has dtype float16, wanted bfloat16 or float32"),
    ("mega_moe", dict(hidden_states=X.to("meta")), ArgumentError,
     "hidden_states is on meta, but this layer runs on the CPU back end"),
]


def test_ops_04_bad_arguments_are_told_to_all(run_ranks):
    """ArgumentError with argument, value and valid values where it is bad, PeerRefused with the same on the others; the next
    call is right."""
    results = run_ranks(3, refused, [(op, changed) for op, changed, _, _ in BAD])
    for number, (op, changed, kind, text) in enumerate(BAD):
        told = [result[number] for result in results]
        assert told[1][0] == kind.__name__ and text in told[1][1], (op, changed.keys(), told[1])
        for error, reason, seconds in (told[0], told[2]):
            assert error == "PeerRefused" and f"{op}: rank 1 refused this call: {told[1][1][:100]}" in reason and seconds < 3.0


def test_bad_arguments_in_one_process(nothing_left):
    calls = calls_by_name(0, 1)
    for op, changed in (("ag_gemm", dict(x=X.double())), ("gemm_rs", dict(weight=torch.ones(12, 5))), ("mega_moe", dict(mode="x"))):
        with pytest.raises(ArgumentError):
            calls[op](**changed)
        calls[op]()


DIFFERENT = [
    ("ag_gemm", [{}, dict(x=torch.ones(4, 24), weight=torch.ones(3, 24))]),
    ("ag_gemm", [{}, dict(x=torch.ones(4, 16).bfloat16(), weight=torch.ones(3, 16).bfloat16())]),
    ("gemm_rs", [{}, dict(weight=torch.ones(24, 5))]),
    ("dispatch_gemm", [{}, dict(tokens_per_rank=4)]),
    ("dispatch_gemm", [{}, dict(topk_weights=W)]),
    ("dispatch_gemm", [{}, dict(activation="gpt_oss")]),
    ("gemm_combine", [{}, dict(w2=torch.ones(2, 24, 4))]),
    ("mega_moe", [{}, dict(weight_position="combine")]),
    ("mega_moe", [{}, dict(hidden_states=X.bfloat16(), w13=torch.ones(2, 8, 16).bfloat16(), w2=torch.ones(2, 16, 4).bfloat16())]),
    ("mega_moe", [{}, dict(hidden_states=torch.ones(4, 24), w13=torch.ones(2, 8, 24), w2=torch.ones(2, 24, 4))]),
]


@pytest.mark.parametrize("op, changed", DIFFERENT, ids=[f"{op}-{'+'.join(changed[1])}" for op, changed in DIFFERENT])
def test_calls_that_differ_are_refused_on_all_ranks(run_ranks, op, changed):
    """Also where one rank could have gone on with the buffers of an earlier call."""
    for error, text, seconds in run_ranks(2, differing, op, changed):
        assert error == "MoETkError" and "ranks disagree about the call" in text and op in text and seconds < 3.0, (error, text)


@pytest.mark.parametrize("op", ["ag_gemm", "gemm_rs", "dispatch_gemm", "gemm_combine", "mega_moe"])
def test_a_rank_that_does_not_call_is_named(run_ranks, op):
    """ProtocolTimeout with op and rank; then the ops of the group refuse until their memory is released on all ranks."""
    results = run_ranks(3, absent, op, 2)
    for told in results[:2]:
        (error, text, seconds), (second, second_text, _) = told
        assert error == "ProtocolTimeout" and text.startswith(f"{op}: missing rank 2.") and "phase exchange" in text
        assert seconds < 1.4
        assert second == "MoETkError" and "release_ops_memory() on every rank" in second_text


def test_a_rank_that_fails_inside_an_op(run_ranks):
    """Its peers are told at once; afterwards every rank refuses, also one whose part had been done, until all start anew."""
    results = run_ranks(3, stops_in_data_session, 1)
    assert results[1][0][:2] == ("MemoryError", "no memory for the launch")
    for rank, (first, second) in enumerate(results):
        if rank != 1:
            assert first[0] == "ProtocolTimeout" and "rank 1 raised an exception" in first[1] and first[2] < 3.0
        assert second[0] in ("MoETkError", "PeerRefused") and "release_ops_memory() on every rank" in second[1] and second[2] < 3.0
