"""Routings by name and from files: shape, determinism, order, refusals."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from moe_tk.bench import routings
from moe_tk.bench.shapes import SHAPES, Shape
from moe_tk.errors import ArgumentError

SMALL = Shape("small", 64, 64, 8, 2)


@pytest.mark.parametrize("spec", ["balanced", "uniform", "zipf", "zipf:2", "hot", "hot:3", "hot_rank:1"])
def test_ids_of_all_ranks_without_repeats_and_equal_every_time(spec):
    first, again = (routings.make(spec, SMALL, tokens=50, world=2, seed=3) for _ in range(2))
    assert first.topk_ids.shape == first.topk_weights.shape == (100, 2)
    assert torch.equal(first.topk_ids, again.topk_ids)
    assert 0 <= int(first.topk_ids.min()) and int(first.topk_ids.max()) < 8
    assert (first.topk_ids[:, 0] != first.topk_ids[:, 1]).all()


def test_balanced_is_balanced_and_hot_is_hot():
    balanced = torch.bincount(routings.make("balanced", SMALL, tokens=16, world=2).topk_ids.flatten(), minlength=8)
    assert balanced.tolist() == [8] * 8
    assert (routings.make("hot:3", SMALL, tokens=16, world=2).topk_ids == 3).any(1).all()


def test_a_steeper_zipf_is_more_skewed():
    loads = [torch.bincount(routings.make(spec, SMALL, tokens=500, world=2).topk_ids.flatten(), minlength=8).max()
             for spec in ("uniform", "zipf:1", "zipf:3")]
    assert loads[0] < loads[1] < loads[2]


@pytest.mark.parametrize("spec", ["hot:8", "hot:-1", "uniform:3"])
def test_parameters_out_of_range(spec):
    with pytest.raises(ArgumentError, match=spec):
        routings.make(spec, SMALL, tokens=4, world=2)


def test_the_traces_that_ship_fit_only_their_shape():
    olmoe = SHAPES["olmoe"]
    trace = routings.make("trace", olmoe, tokens=64, world=2)
    other = routings.make("trace:0", olmoe, tokens=64, world=2)
    assert trace.topk_ids.shape == (128, 8) and not torch.equal(trace.topk_ids, other.topk_ids)
    assert routings.make("flame:3", Shape("f", 64, 64, 64, 6), tokens=8, world=2).topk_ids.shape == (16, 6)
    with pytest.raises(ArgumentError, match="top 8 of 64"):
        routings.make("trace", SMALL, tokens=4, world=2)


def files(folder):
    ids = torch.arange(12).reshape(6, 2) % 8
    np.savez(folder / "a.npz", data=ids.numpy())
    np.save(folder / "a.npy", ids.numpy())
    torch.save({"topk_ids": ids}, folder / "a.pt")
    torch.save(ids.to(torch.int32), folder / "bare.pt")
    save_file({"layer0.topk_idx": ids.to(torch.uint8), "other": torch.zeros(1)}, folder / "a.safetensors")
    np.savez(folder / "layers.npz", prefill_idx=np.stack([ids.numpy()] * 3).astype(np.int8))
    return ids


@pytest.mark.parametrize("name", ["a.npz", "a.npy", "a.pt", "bare.pt", "a.safetensors#layer0.topk_idx", "layers.npz"])
def test_files_are_read_in_order_and_again_when_short(tmp_path, name):
    ids = files(tmp_path)
    found = routings.make(str(tmp_path / name), SMALL, tokens=4, world=2)
    assert torch.equal(found.topk_ids, torch.cat([ids, ids[:2]]).int())
    assert found.topk_weights.shape == (8, 2)


def test_results_name_a_file_without_its_folders(tmp_path):
    assert [routings.label(spec) for spec in ("zipf:1.2", "a/b/c.npz", "/a.safetensors#layer0.ids", "own.npy", "trace:2")] == [
        "zipf:1.2", "c.npz", "a.safetensors#layer0.ids", "own.npy", "trace:2"]


@pytest.mark.parametrize(("name", "said"), [
    ("a.safetensors", "layer0.topk_idx"), ("a.npz#rows", "data"), ("a.csv", "files end with"), ("broken.npz", "cannot be read"),
    ("floats.npz", "not a table"), ("wide.npz", "wants top 2")])
def test_files_that_do_not_fit(tmp_path, name, said):
    files(tmp_path)
    (tmp_path / "broken.npz").write_text("no archive")
    (tmp_path / "a.csv").write_text("1,2")
    np.savez(tmp_path / "floats.npz", data=np.ones((4, 2)))
    np.savez(tmp_path / "wide.npz", data=np.ones((4, 3), dtype=np.int64))
    with pytest.raises(ArgumentError, match=said):
        routings.make(str(tmp_path / name), SMALL, tokens=4, world=2)
