"""Setting up symmetric memory: what differs between ranks is found, what fails on one is told to all, nothing stays behind."""

from __future__ import annotations

import os

import pytest
import torch
from backends import cuda, on_both_with_ranks
from memory_ranks import (
    SIZES,
    dies_before_mapping,
    fails_in_set_up,
    fails_in_set_up_on_gpu,
    generation_after_error,
    other_order,
    too_much,
    windows_match,
)
from ranks import segments_of

from moe_tk.layer import MoELayer
from moe_tk.liveness import own_process
from moe_tk.memory import shm


def test_sym_03_workspaces_made_in_another_order_are_found(run_ranks):
    """Equal sizes, different generations: every rank raises instead of using windows that do not belong together."""
    for error, text, seconds in run_ranks(3, other_order):
        assert error == "MoETkError" and "workspace 3 of" in text and "workspace 2 of" in text and seconds < 3.0
        assert "all ranks must create the same layers and calls in the same order" in text


@on_both_with_ranks
def test_sym_03_layers_dropped_in_another_order_get_windows_that_match(run_ranks, backend):
    """A workspace that one rank has given up is made anew on all, even where the other ranks still have theirs."""
    results = run_ranks(2, windows_match, backend, backend=backend)
    assert results[0] == results[1]


PLACES = {
    "build": ("workspace: native module", "MoETkError"), "local": ("workspace: local buffers", "MoETkError"),
    "create": ("symmetric memory: allocate", "MoETkError"), "reserve": ("symmetric memory: allocate", "CapacityError"),
    "map": ("symmetric memory: map", "MoETkError"), "bind": ("workspace: native part", "MoETkError"),
    "pipe": ("liveness watch: pipe", "MoETkError"),
}


@pytest.mark.parametrize("place", PLACES)
def test_sym_09_a_rank_that_fails_in_set_up_is_named_by_all(run_ranks, place):
    """All ranks end at once; the first error, its rank and its step are what everybody sees; the next layer can be made."""
    step, kind = PLACES[place]
    results = run_ranks(3, fails_in_set_up, place, 1)
    for rank, ((error, text, seconds), (second, second_text, _)) in enumerate(results):
        assert seconds < 3.0 and second == "none", second_text
        if rank != 1:
            assert error == kind and text.startswith(f"{step}: failed on rank 1: "), text
            assert "No space left on device" in text or f"boom in {place}" in text
        else:
            assert error == (kind if place in ("create", "reserve", "map") else "RuntimeError"), (error, text)


GPU_PLACES = {  # step, class; whether the failed rank says the same as the others
    "build": ("workspace: native module", "MoETkError", False), "local": ("workspace: local buffers", "MoETkError", False),
    "segment": ("allocate", "CapacityError", True), "bind": ("workspace: native part", "MoETkError", False),
    "pipe": ("liveness watch: pipe", "MoETkError", False),
}


@pytest.mark.parametrize("place", GPU_PLACES)
@pytest.mark.parametrize("backend", [cuda(world=2)])
def test_sym_09_a_rank_that_fails_in_set_up_on_a_gpu_is_named_by_all(run_ranks, backend, place):
    """The same on the CUDA back end: in each step of the set-up all ranks end at once, and the next layer can be made and called.
    Not in the mapping itself, which is a collective of torch's own."""
    step, kind, same = GPU_PLACES[place]
    for rank, ((error, text, seconds), second) in enumerate(run_ranks(2, fails_in_set_up_on_gpu, place, 1, backend=backend)):
        assert seconds < 3.0 and second[0] == "none", (text, second)
        if rank == 0 or same:
            assert error == kind and step in text and "rank 1" in text and "boom" in text, (error, text)
        else:
            assert error in (kind, "RuntimeError"), (error, text)


def test_a_layer_that_does_not_fit_is_the_same_error_everywhere(run_ranks):
    """More than /dev/shm can ever hold: CapacityError with the numbers on all ranks, and nothing of it stays."""
    stat = os.statvfs(shm.SHM_DIR)
    for error, text, _ in run_ranks(2, too_much, stat.f_blocks * stat.f_frsize // (2 * 2 * 8192 * 4) * 2 + 1024):
        assert error == "CapacityError" and "max_tokens_per_rank" in text and "MiB" in text


def test_names_are_gone_once_every_rank_has_the_memory(nothing_left):
    layer = MoELayer(**SIZES)
    assert segments_of([os.getpid()]) == [] and layer.session.workspace.heap.bases[0] % 4096 == 0


def test_memory_starts_as_zeros(nothing_left):
    heap = MoELayer(**SIZES).session.workspace.heap
    assert bool((heap.tensor(0, 0, (heap.size,), torch.uint8) == 0).all())


def test_what_a_killed_process_leaves_is_removed_by_the_next_set_up(fresh_ranks):
    """Killed between creating and unlinking its segment: the survivors get PeerLost, and the segment goes."""
    outcomes = fresh_ranks(3, dies_before_mapping)
    assert outcomes[1].exit_code == -9
    assert {outcomes[rank].value for rank in (0, 2)} == {"PeerLost"}, outcomes


def test_only_dead_processes_of_this_namespace_lose_segments(tmp_path, monkeypatch):
    """Segments of live processes, of other pid namespaces and of other programs stay."""
    monkeypatch.setattr(shm, "SHM_DIR", tmp_path)
    prefix, own = shm.PREFIX, own_process()
    namespace, pid, start = str(own).split(".")
    dead = [f"{prefix}.{namespace}.{pid}.{int(start) - 1}.0", f"{prefix}.{namespace}.{2**22 - 1}.5.3"]
    alive = [f"{prefix}.{own}.0", f"{prefix}.{int(namespace) + 1}.{pid}.1.0", f"{prefix}.notes.txt", "other.1.2.3.4",
             f"{prefix}_x.1.2.3.4"]
    for name in dead + alive:
        (tmp_path / name).touch()
    shm.remove_stale_segments()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(alive)


def test_different_layers_name_both_sides(run_ranks):
    for text in run_ranks(2, generation_after_error):
        assert "rank 0 asked for" in text and "hidden=16" in text and "rank 1 asked for" in text and "hidden=24" in text


def test_a_closed_session_gives_its_memory_up(nothing_left):
    """close() ends watch and memory at once; the layer refuses calls from then on; closing again is allowed."""
    from pathlib import Path

    layer = MoELayer(**SIZES)
    layer.load_weights(torch.ones(6, 24, 16), torch.ones(6, 16, 12))
    layer.session.close()
    assert "/dev/shm/moe_tk." not in Path("/proc/self/maps").read_text()
    with pytest.raises(Exception, match="unusable since an earlier call failed: it was closed"):
        layer(torch.ones(1, 16), torch.zeros(1, 2, dtype=torch.int32), torch.ones(1, 2))
    layer.session.close()
