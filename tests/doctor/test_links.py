"""What a rank tells the others about its GPU's links: the verdict of each pair of recorded machines."""

from __future__ import annotations

import machines
import pytest

from moe_tk.topology.links import links_of


def protocols(name: str, tmp_path, first: int = 0) -> list[tuple[str, bool]]:
    snapshot = machines.snapshot(name, tmp_path)
    own = next(gpu.uuid for gpu in snapshot.gpus if gpu.cuda_index == first)
    links = links_of(snapshot, own)
    assert own not in links
    return [links[gpu.uuid][:2] for gpu in sorted(snapshot.gpus, key=lambda gpu: gpu.cuda_index) if gpu.uuid != own]


def test_without_probes_a_pair_counts_as_what_a_passing_probe_would_allow(tmp_path):
    assert protocols("h200_x2", tmp_path) == [("nvlink", False)]
    assert protocols("h100_x8_nvswitch", tmp_path) == [("nvlink", False)] * 7


def test_islands_and_machines_without_nvlink(tmp_path):
    assert [protocol for protocol, _ in protocols("nvlink_two_islands", tmp_path)].count("nvlink") == 3
    assert ("nvlink", False) not in protocols("rtx_pro_5000_x4", tmp_path)


@pytest.mark.parametrize("name", machines.NAMES)
def test_texts_are_short_and_say_why_not(name, tmp_path):
    snapshot = machines.snapshot(name, tmp_path)
    for gpu in snapshot.gpus:
        for protocol, verified, text in links_of(snapshot, gpu.uuid).values():
            assert not verified or protocol != "nvlink"  # no probe was made on a recorded machine
            assert len(text) <= 160 and (text != "") == (protocol != "nvlink")
