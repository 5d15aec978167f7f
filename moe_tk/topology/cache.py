"""Probe results kept between runs, keyed by what can change them: the GPUs, the driver, the boot.

A file that is truncated, foreign or of another key counts as absent. Writing is atomic; failing to write is no error.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from moe_tk.errors import TopologyError
from moe_tk.topology.facts import TopologySnapshot
from moe_tk.topology.probes import ProbeResults, probes_from_json, probes_to_json

CACHE_SCHEMA = "moe_tk.verdict-cache/1"
FOLDER = "verdicts"


@dataclass(frozen=True, slots=True)
class Key:
    """What a result is valid for. The order of GPUs, and so CUDA_VISIBLE_DEVICES, does not matter."""

    uuids: tuple[str, ...]  # sorted
    driver: str
    boot_id: str

    @property
    def file_name(self) -> str:
        text = "\0".join((*self.uuids, self.driver, self.boot_id))
        return f"{hashlib.sha256(text.encode()).hexdigest()[:24]}.json"


@dataclass(frozen=True, slots=True)
class Cached:
    """Results from an earlier run, and how long ago that was."""

    probes: ProbeResults
    path: Path
    age_s: float


def cache_key(snapshot: TopologySnapshot, uuids: Sequence[str]) -> Key | None:
    """The key for these GPUs, None when a part is unknown (then nothing may be kept) or there are fewer than two."""
    driver = snapshot.host.driver or snapshot.host.driver_module
    boot_id = snapshot.host.boot_id
    if not driver or not boot_id or len(set(uuids)) < 2:
        return None
    return Key(tuple(sorted(set(uuids))), driver, boot_id)


def load_cached(key: Key, folders: Iterable[Path], now: float | None = None) -> Cached | None:
    """The newest valid result for this key in any of the folders, else None. Never raises for what a file holds.

    Without one, results of a larger group that contains these GPUs, under the same driver and boot, are as good.
    """
    places = list(folders)
    moment = time.time() if now is None else now
    exact = [_read(folder / FOLDER / key.file_name, key, moment) for folder in places]
    found = [cached for cached in exact if cached is not None]
    if not found:  # a larger group probed on the same boot tells about its members too
        paths = [path for folder in places for path in (folder / FOLDER).glob("*.json")]
        found = [cached for path in paths if (cached := _read(path, key, moment, larger=True)) is not None]
    return min(found, key=lambda cached: cached.age_s, default=None)


def _read(path: Path, key: Key, now: float, larger: bool = False) -> Cached | None:
    try:
        data = json.loads(path.read_text())
        theirs = Key(tuple(data["key"]["uuids"]), data["key"]["driver"], data["key"]["boot_id"])
        same = theirs == key or larger and set(theirs.uuids) > set(key.uuids) and (
            theirs.driver, theirs.boot_id) == (key.driver, key.boot_id)
        if data["schema"] != CACHE_SCHEMA or not same or theirs.file_name != path.name:
            return None
        probes = probes_from_json(data["probes"])
        return Cached(probes, path, max(0.0, now - float(data["written"])))
    except (OSError, ValueError, KeyError, TypeError, TopologyError):
        return None


def store_cached(key: Key, probes: ProbeResults, folders: Iterable[Path], now: float | None = None) -> Path | None:
    """Write into the first folder that takes it, whole or not at all; the path, or None when none did."""
    written = time.time() if now is None else now
    text = json.dumps({"schema": CACHE_SCHEMA, "key": _plain(key), "written": written,
                       "probes": probes_to_json(probes)})
    for folder in folders:
        path = folder / FOLDER / key.file_name
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".writing-")
            try:
                with os.fdopen(handle, "w") as file:
                    file.write(text)
                os.replace(temporary, path)
            except BaseException:
                os.unlink(temporary)
                raise
        except OSError:
            continue
        return path
    return None


def _plain(key: Key) -> dict[str, object]:
    return {"uuids": list(key.uuids), "driver": key.driver, "boot_id": key.boot_id}
