"""What the ranks of the ops tests do. Imports no pytest: every rank loads this module."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from layer_ranks import Told, attempt
from moe_cases import LayerCase, check_result, digest

from moe_tk import ops, reference
from moe_tk.runtime.launch import resolve_activation
from moe_tk.schedule import build_tables, expert_range
from moe_tk.weights import shard_weights


@contextmanager
def new_tensors_are_nan() -> Iterator[None]:
    """Outputs that an op does not write are NaN, not what a lucky allocation holds."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def close_to(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype) -> None:
    assert got.dtype == dtype and got.shape == want.shape, (got.dtype, got.shape, want.shape)
    error = reference.relative_error(got, want)
    assert error <= reference.ERROR_BUDGET[dtype], f"relative error {error:.2e}"


def parts(seed: int, shape: tuple[int, ...], dtype: torch.dtype, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def gather(rank: int, world: int, calls: list[tuple[int, int, list[int], torch.dtype]]) -> None:
    """ag_gemm for each (T, H, columns of every rank, dtype), twice each, against gather and matmul in float64."""
    for number, (tokens, hidden, columns, dtype) in enumerate(calls):
        rows = [parts(100 * number + r, (tokens, hidden), dtype) for r in range(world)]
        weight = parts(7 + rank, (columns[rank], hidden), dtype, hidden**-0.5)
        want = torch.cat(rows).double() @ weight.double().T
        bits = set()
        for _ in range(2):
            with new_tensors_are_nan():
                got = ops.ag_gemm(rows[rank], weight)
            close_to(got, want, dtype)
            bits.add(digest(got))
        assert len(bits) == 1


def scatter(rank: int, world: int, calls: list[tuple[int, int, list[int], torch.dtype]]) -> None:
    """gemm_rs for each (rows per rank, N, depths of every rank, dtype), twice each, against matmul and sum in float64."""
    for number, (tokens, columns, depths, dtype) in enumerate(calls):
        rows = [parts(100 * number + r, (world * tokens, depths[r]), dtype) for r in range(world)]
        weights = [parts(7 + r, (columns, depths[r]), dtype, sum(depths)**-0.5) for r in range(world)]
        want = sum(x.double() @ w.double().T for x, w in zip(rows, weights, strict=True))[rank * tokens:(rank + 1) * tokens]
        bits = set()
        for _ in range(2):
            with new_tensors_are_nan():
                got = ops.gemm_rs(rows[rank], weights[rank])
            close_to(got, want, dtype)
            bits.add(digest(got))
        assert len(bits) == 1


def two_steps(rank: int, world: int, case: LayerCase, *, mode: str, activation: str, limit: float | None, weight_position: str,
              stride: int | None) -> None:
    """dispatch_gemm, then gemm_combine; both alone and the two together against the reference."""
    w13, w2 = shard_weights(*case.weights(), mode=mode, world=world, rank=rank)
    common = dict(num_experts=case.num_experts, mode=mode, tokens_per_rank=stride)
    form = resolve_activation(activation, limit)
    for epoch in range(len(case.counts)):
        hidden, ids, weights = case.inputs(epoch, world, rank)
        weights = weights.float()
        first, second = (weights, None) if weight_position == "before_l2" else (None, weights)
        with new_tensors_are_nan():
            activated, offsets, slots = ops.dispatch_gemm(hidden, ids, w13, topk_weights=first, activation=activation,
                                                          swiglu_limit=limit, **common)
        check_activated(rank, world, case, epoch, mode, form, weight_position, stride, (activated, offsets, slots))
        activated[(activated == 0).all(1)] = float("nan")  # rows that hold no pair must not be read
        with new_tensors_are_nan():
            got = ops.gemm_combine(activated, ids, w2, topk_weights=second, **common)
        want = reference.moe_layer(hidden, ids, weights, *case.weights(), **vars_of(form))
        check_result(got, want, ids, case.num_experts, case.dtype)


def vars_of(form: Any) -> dict[str, Any]:
    return dict(alpha=form.alpha, beta=form.beta, gate_limit=form.gate_limit, up_limit=form.up_limit)


def check_activated(rank: int, world: int, case: LayerCase, epoch: int, mode: str, form: Any, weight_position: str,
                    stride: int | None, result: tuple[torch.Tensor, ...]) -> None:
    """The rows of dispatch_gemm against float64, zero where no pair is; its tables against the golden ones."""
    activated, offsets, slots = result
    counts = case.counts[epoch]
    stride = counts[0] if stride is None else stride
    all_ids = torch.full((world * stride, case.top_k), -1)
    all_rows = torch.zeros(world * stride, case.hidden, dtype=torch.float64)
    all_weights = torch.zeros(world * stride, case.top_k, dtype=torch.float64)
    for source in range(world):
        place = slice(source * stride, source * stride + counts[source])
        hidden, ids, weights = case.inputs(epoch, world, source)
        all_rows[place], all_ids[place], all_weights[place] = hidden.double(), ids.long(), weights.double()
    golden = build_tables(all_ids, token_counts=counts, world=world, rank=rank, num_experts=case.num_experts, mode=mode,
                          row_block=32, impl="golden")
    assert golden.slots.equal(slots) and golden.expert_offsets.equal(offsets)
    w13, _ = case.weights()
    mine, _ = shard_weights(*case.weights(), mode=mode, world=world, rank=rank)
    inter = mine.shape[1] // 2
    first = golden.first_expert
    want = torch.zeros(activated.shape, dtype=torch.float64)
    for row, choice in (slots >= 0).nonzero().tolist():
        both = mine[int(all_ids[row, choice]) - first].double() @ all_rows[row]
        value = reference.activate(both[:inter], both[inter:], **vars_of(form))
        want[slots[row, choice]] = value * (all_weights[row, choice] if weight_position == "before_l2" else 1.0)
    close_to(activated, want, case.dtype)
    empty = torch.ones(len(activated), dtype=torch.bool)
    empty[slots[slots >= 0].long()] = False
    assert bool((activated[empty] == 0).all())


def mega(rank: int, world: int, case: LayerCase, **options: Any) -> list[str]:
    """mega_moe over all epochs, twice each; digests."""
    mode = options.get("mode", "ep")
    w13, w2 = shard_weights(*case.weights(), mode=mode, world=world, rank=rank)
    form = resolve_activation(options.get("activation", "swiglu"), options.get("swiglu_limit"))
    digests = []
    for epoch in range(len(case.counts)):
        inputs = case.inputs(epoch, world, rank)
        want = reference.moe_layer(*inputs, *case.weights(), **vars_of(form))
        for _ in range(2):
            with new_tensors_are_nan():
                got = ops.mega_moe(*inputs, w13, w2, num_experts=case.num_experts, **options)
            check_result(got, want, inputs[1], case.num_experts, case.dtype)
            digests.append(digest(got))
    assert digests[::2] == digests[1::2]
    return digests


def group_sizes(rank: int, world: int, sizes: list[int]) -> None:
    """Rows of experts 0, 1, 2 as given, the rest of the ids invalid: the rows of dispatch_gemm are right or zero, none is NaN."""
    case = LayerCase(((sum(sizes) + 1,),), ("uniform",), 3, 1, 16, 8)
    hidden, _, _ = case.inputs(0, 1, 0)
    ids = torch.tensor([e for e, size in enumerate(sizes) for _ in range(size)] + [-1])[:, None]
    w13, w2 = case.weights()
    with new_tensors_are_nan():
        activated, offsets, slots = ops.dispatch_gemm(hidden, ids, w13, num_experts=3)
        got = ops.gemm_combine(activated, ids, w2, num_experts=3)
    assert not bool(activated.isnan().any()) and int((activated != 0).any(1).sum()) == sum(sizes)
    assert offsets.diff().tolist() == [-(-size // 32) * 32 for size in sizes]
    want = reference.moe_layer(hidden, ids, torch.ones(ids.shape), w13, w2)
    close_to(got, want, torch.float32)


def uneven(rank: int, world: int) -> dict[str, Told]:
    """Ops with an equal-T contract called with T = 6, 7, 7, ...; then all of them again as they should be."""
    tokens = 6 if rank == 0 else 7
    x, eye = torch.ones(tokens, 8), torch.eye(8)
    ids = torch.zeros(tokens, 1, dtype=torch.int32)
    first, _ = expert_range(world, world, rank)
    w13 = torch.ones(1, 8, 8)
    told = {
        "ag_gemm": attempt(lambda: ops.ag_gemm(x, eye)),
        "gemm_rs": attempt(lambda: ops.gemm_rs(torch.ones(tokens * world, 8), eye)),
        "dispatch_gemm": attempt(lambda: ops.dispatch_gemm(x, ids, w13, num_experts=world)),
        "too small": attempt(lambda: ops.dispatch_gemm(x, ids, w13, num_experts=world, tokens_per_rank=6)),
    }
    assert ops.ag_gemm(x[:6], eye).shape == (6 * world, 8)
    assert ops.gemm_rs(torch.ones(6 * world, 8), eye).equal(torch.full((6, 8), float(world)))
    assert ops.dispatch_gemm(x, ids, w13, num_experts=world, tokens_per_rank=7)[2].shape == (7 * world, 1)
    return told


def calls_by_name(rank: int, world: int) -> dict[str, Any]:
    """A right call of each op, as name -> function of changed arguments."""
    experts = 2 * world
    x, ids, weights = torch.ones(4, 16), torch.zeros(4, 2, dtype=torch.int32), torch.ones(4, 2)
    w13, w2 = torch.ones(2, 8, 16), torch.ones(2, 16, 4)
    rows = -(-4 * world * 2 // 32) * 32 + 64
    return {
        "ag_gemm": lambda **c: ops.ag_gemm(**{**dict(x=x, weight=torch.ones(3, 16)), **c}),
        "gemm_rs": lambda **c: ops.gemm_rs(**{**dict(x=torch.ones(4 * world, 5), weight=torch.ones(16, 5)), **c}),
        "dispatch_gemm": lambda **c: ops.dispatch_gemm(**{**dict(hidden_states=x, topk_ids=ids, w13=w13, num_experts=experts),
                                                          **c}),
        "gemm_combine": lambda **c: ops.gemm_combine(**{**dict(activated=torch.ones(rows, 4), topk_ids=ids, w2=w2,
                                                               num_experts=experts), **c}),
        "mega_moe": lambda **c: ops.mega_moe(**{**dict(hidden_states=x, topk_ids=ids, topk_weights=weights, w13=w13, w2=w2,
                                                       num_experts=experts), **c}),
    }


def refused(rank: int, world: int, bad: list[tuple[str, dict[str, Any]]]) -> list[Told]:
    """Rank 1 calls each op with something wrong, the others rightly; after each, all call rightly."""
    calls = calls_by_name(rank, world)
    told = []
    for name, changed in bad:
        told.append(attempt(lambda name=name, changed=changed: calls[name](**(changed if rank == 1 else {}))))
        calls[name]()
    return told


def differing(rank: int, world: int, op: str, changed: list[dict[str, Any]]) -> Told:
    """Each rank makes a right call of its own (changed[rank]) after all have made the same one; then again the same."""
    call = calls_by_name(rank, world)[op]
    call()
    told = attempt(lambda: call(**changed[rank]))
    call()
    return told


def widths_change(rank: int, world: int) -> None:
    """Parts of the weights that change their width on some ranks only, up and down: each call is right at once."""
    def gathered(columns: list[int]) -> None:
        begin = time.monotonic()
        x = parts(rank, (5, 8), torch.float32)
        everyone = torch.cat([parts(r, (5, 8), torch.float32) for r in range(world)])
        weight = parts(50, (columns[rank], 8), torch.float32)
        close_to(ops.ag_gemm(x, weight), everyone.double() @ weight.double().T, torch.float32)
        assert time.monotonic() - begin < 5.0

    def summed(inter: int) -> None:
        begin = time.monotonic()
        case = LayerCase(((5,) * world,), ("uniform",), 4, 2, 16, inter)
        mega(rank, world, case, mode="tp")
        assert time.monotonic() - begin < 5.0

    for turn in range(3):
        gathered([3 + (turn if r == 0 else 0) for r in range(world)])
    gathered([3] * world)
    for inter in (2 * world, 2 * world + 1, 2 * world, 2 * world + 1):
        summed(inter)


def absent(rank: int, world: int, op: str, missing: int) -> list[Told]:
    """Rank `missing` does not call the op; the next calls are refused until the memory of the ops is released on all."""
    call = calls_by_name(rank, world)[op]
    call()
    told = []
    if rank == missing:
        time.sleep(0.9)
    else:
        told = [attempt(lambda: call(timeout_s=0.4)), attempt(call)]
    ops.release_ops_memory()
    call()
    return told


def stops_in_data_session(rank: int, world: int, culprit: int) -> list[Told]:
    """Rank `culprit` fails between exchange and launch of an op; then every rank calls again, then all start anew."""
    from moe_tk.runtime import calls as steps

    call = calls_by_name(rank, world)["mega_moe"]
    call()
    launch = steps.OpenCall.launch

    def fails(self: Any, *_: Any, **__: Any) -> None:
        raise MemoryError("no memory for the launch")

    if rank == culprit:
        steps.OpenCall.launch = fails
    try:
        first = attempt(lambda: call(timeout_s=5.0))
    except MemoryError as error:
        first = ("MemoryError", str(error), 0.0)
    finally:
        steps.OpenCall.launch = launch
    second = attempt(lambda: call(timeout_s=5.0))
    ops.release_ops_memory()
    call()
    return [first, second]
