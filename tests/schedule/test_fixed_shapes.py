"""The vectorised core has no shape, and no host value, that depends on data: a CUDA graph can capture it."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from moe_tk.schedule import build_padded, max_slots, mega_order, task_order, trim

from .cases import Case, assert_equal, fill

SIZES = dict(world=8, rank=3, num_experts=64, row_block=8, segments=4)


def core(ids, counts):
    padded = build_padded(ids, counts, mode="ep", **SIZES)
    return *padded.tables.tensors().values(), task_order(padded.tables, 3), mega_order(padded.tables, 2, 3, 2), \
        padded.num_slots, padded.num_blocks, padded.num_jobs


@pytest.mark.parametrize("mode, local", [("ep", 8), ("tp", 64)])
def test_runs_on_tensors_without_data(mode, local):
    """Fake tensors hold no values: an operation that needs one (item, nonzero, a boolean index) raises."""
    with FakeTensorMode():
        ids, counts = torch.empty(8 * 100, 6, dtype=torch.int32), torch.empty(8, dtype=torch.int32)
        padded = build_padded(ids, counts, mode=mode, **SIZES)
        assert padded.tables.num_slots == max_slots(8, 100, 6, local, 4, 8)
        assert padded.tables.num_jobs == 800
        assert task_order(padded.tables, 3).shape == (padded.tables.num_blocks * 3, 4)
        assert mega_order(padded.tables, 2, 3, 2).shape == (padded.tables.num_blocks * 5, 4)
        with pytest.raises((DataDependentOutputException, DynamicOutputShapeException)):
            trim(padded)  # the proof has teeth: trimming does need values


def test_traced_graph_is_right_for_other_routings():
    """Traced on one routing, the straight-line graph gives the tables of any other: nothing was baked in."""
    def ids(kind, seed):
        return fill(kind, 8 * 20, 6, 64, 8, seed).int()

    graph = make_fx(core)(ids("uniform", 0), torch.full((8,), 20, dtype=torch.int32))
    names = {str(node.target) for node in graph.graph.nodes}
    assert not any(word in name for name in names for word in ("_local_scalar_dense", "nonzero", "masked_select"))
    for kind, counts in (("hot_expert", [20] * 8), ("all_invalid", [20] * 8), ("zipf", [0, 1, 20, 7, 0, 19, 3, 2])):
        other, count = ids(kind, 1), torch.tensor(counts, dtype=torch.int32)
        for seen, wanted in zip(graph(other, count), core(other, count), strict=True):
            assert torch.equal(seen, wanted)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("mode", ["ep", "tp"])
def test_cuda_graph_replays_with_new_routing(mode):
    """Captured once, replayed on other routings: equal to the golden tables each time."""
    counts = torch.full((8,), 100, dtype=torch.int32, device="cuda")
    ids = torch.zeros(8 * 100, 6, dtype=torch.int32, device="cuda")
    build_padded(ids, counts, mode=mode, **SIZES)  # warm-up
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        padded = build_padded(ids, counts, mode=mode, **SIZES)
    for seed, kind in enumerate(("uniform", "zipf", "hot_rank", "all_invalid", "out_of_range", "duplicates")):
        host = fill(kind, 8 * 100, 6, 64, 8, seed).int()
        host_counts = torch.randint(0, 101, (8,), generator=torch.Generator().manual_seed(seed)).int()
        ids.copy_(host)
        counts.copy_(host_counts)
        graph.replay()
        case = Case(host, host_counts.tolist(), 8, 64, mode, 8, 4, 32)
        assert_equal(trim(padded).to("cpu"), case.build(3, "golden"))
