"""What the verdict says about one GPU and each of the others, in a form that fits into a message to the other ranks."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from moe_tk.topology.cache import cache_key, load_cached
from moe_tk.topology.facts import TopologySnapshot
from moe_tk.topology.verdict import judge_pair

MOST_TEXT = 160  # characters of a pair's text, so that those of sixteen GPUs fit into a message


def links_of(snapshot: TopologySnapshot, uuid: str, folders: Iterable[Path] = ()) -> dict[str, tuple[str, bool, str]]:
    """By the UUID of each other GPU: (protocol, verified, text). folders: where probe results are kept.

    protocol is what the pair may use by its probe; where none was made, what a probe that passes would allow. The text is kept
    where that is not NVLink. Slices of a GPU are left out: nothing but their own GPU reaches them.
    """
    folders, found = tuple(folders), {}
    for gpu in snapshot.gpus:
        if gpu.uuid == uuid or gpu.is_slice:
            continue
        key = cache_key(snapshot, (uuid, gpu.uuid))
        kept = load_cached(key, folders) if key is not None else None
        pair = judge_pair(snapshot, kept.probes if kept else None, uuid, gpu.uuid)
        unverified = pair.reason in ("pair-unverified", "pair-unknown")
        protocol = pair.expected or "unknown" if unverified else pair.protocol
        found[gpu.uuid] = (protocol, not unverified, "" if protocol == "nvlink" else pair.text[:MOST_TEXT])
    return found
