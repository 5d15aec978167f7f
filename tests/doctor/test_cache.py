"""Kept probe results: what they are valid for, and that no file on disk can hurt (DOC-18)."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os

import machines
import pytest

from moe_tk.diagnose import diagnose
from moe_tk.topology.cache import FOLDER, cache_key, load_cached, store_cached


@pytest.fixture
def kept(machine_snapshot, tmp_path):
    snapshot = machine_snapshot("nvlink_bridges_two_pairs")
    uuids = [gpu.uuid for gpu in snapshot.visible]
    probes = machines.passing(snapshot)
    key = cache_key(snapshot, uuids)
    folder = tmp_path / "kept"
    path = store_cached(key, probes, [folder], now=1000.0)
    return snapshot, uuids, probes, key, folder, path


def test_what_is_stored_comes_back_with_its_age(kept):
    _, _, probes, key, folder, path = kept
    cached = load_cached(key, [folder], now=1090.0)
    assert (cached.probes, cached.age_s, cached.path) == (probes, 90.0, path)


def test_doc_18_order_and_visible_indices_do_not_matter(kept):
    snapshot, uuids, _, key, _, _ = kept
    assert cache_key(snapshot, uuids[::-1]) == key


@pytest.mark.parametrize("change", ["driver", "boot_id"])
def test_doc_18_another_driver_or_boot_is_another_machine(kept, change):
    snapshot, uuids, _, _, folder, _ = kept
    other = dataclasses.replace(snapshot, host=dataclasses.replace(snapshot.host, **{change: "another"}))
    assert load_cached(cache_key(other, uuids), [folder]) is None


def test_doc_18_a_swapped_card_is_another_machine(kept):
    snapshot, uuids, _, _, folder, _ = kept
    assert load_cached(cache_key(snapshot, [*uuids[:3], "GPU-another"]), [folder]) is None


def test_a_part_of_a_probed_group_is_known(kept):
    snapshot, uuids, _, _, folder, _ = kept
    assert load_cached(cache_key(snapshot, uuids[1:3]), [folder]) is not None


def test_nothing_is_kept_for_unknown_machines(machine_snapshot):
    snapshot = machine_snapshot("nvlink_bridges_two_pairs")
    without = dataclasses.replace(snapshot, host=dataclasses.replace(snapshot.host, boot_id=None))
    assert cache_key(without, [gpu.uuid for gpu in snapshot.visible]) is None


@pytest.mark.parametrize("content", ["", "{", "null", "[]", '{"schema": "other"}', "\x00\x01"])
def test_doc_18_broken_file_is_ignored_and_replaced(kept, content):
    _, _, probes, key, folder, path = kept
    path.write_text(content)
    assert load_cached(key, [folder]) is None
    assert store_cached(key, probes, [folder]) == path
    assert load_cached(key, [folder]).probes == probes


def test_doc_18_truncated_at_any_byte(kept):
    _, _, _, key, folder, path = kept
    text = path.read_text()
    for size in range(0, len(text) - 1, 97):
        path.write_text(text[:size])
        assert load_cached(key, [folder]) is None


def test_doc_18_foreign_file_under_our_name_is_ignored(kept):
    _, _, _, key, folder, path = kept
    data = json.loads(path.read_text())
    data["key"]["driver"] = "another"
    path.write_text(json.dumps(data))
    assert load_cached(key, [folder]) is None


def test_doc_18_read_only_folder_is_no_error(kept, tmp_path):
    _, _, probes, key, _, _ = kept
    blocked = tmp_path / "a file"
    blocked.write_text("")
    second = tmp_path / "second"
    assert store_cached(key, probes, [blocked]) is None
    assert store_cached(key, probes, [blocked, second]).is_relative_to(second)


def _write_many(key, probes, folder):
    for _ in range(30):
        store_cached(key, probes, [folder])


def test_doc_18_two_writers_leave_a_whole_file(kept):
    _, _, probes, key, folder, path = kept
    spawn = multiprocessing.get_context("spawn")
    writers = [spawn.Process(target=_write_many, args=(key, probes, folder)) for _ in range(2)]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        assert load_cached(key, [folder]) is not None
    assert [writer.exitcode for writer in writers] == [0, 0]
    assert os.listdir(folder / FOLDER) == [path.name]


def test_doctor_uses_and_shows_what_is_kept(kept, cache_dir):
    snapshot, uuids, probes, key, _, _ = kept
    assert diagnose(snapshot=snapshot).verdict.verified is False
    store_cached(key, probes, [cache_dir])
    report = diagnose(snapshot=snapshot)
    assert report.verdict.verified and report.probe_age_s < 60
    assert diagnose(snapshot=snapshot, use_cache=False).verdict.verified is False
