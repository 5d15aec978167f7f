"""Symmetric memory of the CPU backend: one POSIX shared-memory segment per rank, mapped by all ranks of the group.

Setting up goes in steps (allocate, exchange, map, confirm). A rank that fails in one still takes part in the exchange
after it, so all ranks end with the first failure instead of waiting for each other. Names are unlinked as soon as
every rank has the segment open; what a killed process may leave before that is removed by the next set-up.
"""

from __future__ import annotations

import itertools
import mmap
import os
from pathlib import Path
from typing import Any

import torch

from moe_tk.errors import CapacityError, MoETkError
from moe_tk.group import RankGroup

SHM_DIR = Path("/dev/shm")
PREFIX = "moe_tk"
_counter = itertools.count()


def process_start(pid: int) -> str | None:
    """Start time of a process in clock ticks (tells a reused pid from the old one); None if it is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = stat[stat.rindex(")") + 2:].split()
    return None if fields[0] in "ZX" else fields[19]


def remove_stale_segments() -> None:
    """Unlinks segments of processes that are gone (killed between creating and unlinking theirs)."""
    for path in SHM_DIR.glob(f"{PREFIX}.*"):
        parts = path.name.split(".")
        if len(parts) == 4 and parts[1].isdigit() and process_start(int(parts[1])) != parts[2]:
            path.unlink(missing_ok=True)


class ShmHeap:
    """Segments of all ranks of a group, each `size` bytes and zeroed. `bases[r]` is where rank r's is mapped here."""

    def __init__(self, group: RankGroup, size: int, *, tag: str, timeout_s: float) -> None:
        """A collective. `tag` names what the memory is for: it must be equal on all ranks, as must `size`.

        Raises MoETkError (CapacityError when /dev/shm is too small) on all ranks if any rank fails.
        """
        self.group, self.size = group, size
        self._maps: list[mmap.mmap] = []
        self._views: list[torch.Tensor] = []
        remove_stale_segments()
        path = SHM_DIR / f"{PREFIX}.{os.getpid()}.{process_start(os.getpid())}.{next(_counter)}"
        own_fd = -1
        try:
            own_fd, failure = self._allocate(path, size)
            offers = group.gather({"path": str(path), "size": size, "tag": tag, "failure": failure},
                                  timeout_s=timeout_s, step="symmetric memory: exchange")
            self._check_offers(offers)
            failure = self._map_all(offers, own_fd)
            failures = group.gather(failure, timeout_s=timeout_s, step="symmetric memory: confirm")
            self._raise_first(failures)
        except BaseException:
            self.close()
            raise
        finally:
            path.unlink(missing_ok=True)
            if own_fd >= 0:
                os.close(own_fd)

    @staticmethod
    def _allocate(path: Path, size: int) -> tuple[int, tuple[str, str, bool] | None]:
        """(file descriptor, failure). posix_fallocate reserves and zeroes: a full /dev/shm is an error here, not a bus error later."""
        fd = -1
        try:
            fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
            os.posix_fallocate(fd, 0, size)
        except OSError as error:
            stat = os.statvfs(SHM_DIR) if SHM_DIR.exists() else None
            free = f"{stat.f_bavail * stat.f_frsize / 2**20:.0f} MiB free" if stat else "it does not exist"
            return fd, ("allocate", f"{size / 2**20:.1f} MiB in {SHM_DIR}: {error.strerror} ({free}; lower "
                                    "max_tokens_per_rank or enlarge it, in a container with --shm-size)", True)
        return fd, None

    def _check_offers(self, offers: list[dict[str, Any]]) -> None:
        self._raise_first([offer["failure"] for offer in offers])
        for rank, offer in enumerate(offers):
            if (offer["tag"], offer["size"]) != (offers[0]["tag"], offers[0]["size"]):
                raise MoETkError(f"symmetric memory: rank 0 set up {offers[0]['tag']} with {offers[0]['size']} bytes but rank "
                                 f"{rank} set up {offer['tag']} with {offer['size']} bytes: all ranks must create the same "
                                 "layers and calls in the same order")

    @staticmethod
    def _raise_first(failures: list[tuple[str, str, bool] | None]) -> None:
        for rank, failure in enumerate(failures):
            if failure is not None:
                step, text, capacity = failure
                raise (CapacityError if capacity else MoETkError)(f"symmetric memory: rank {rank} failed in step {step}: {text}")

    def _map_all(self, offers: list[dict[str, Any]], own_fd: int) -> tuple[str, str, bool] | None:
        for rank, offer in enumerate(offers):
            try:
                fd = own_fd if rank == self.group.rank else os.open(offer["path"], os.O_RDWR)
                try:
                    segment = mmap.mmap(fd, self.size)
                finally:
                    if fd != own_fd:
                        os.close(fd)
            except OSError as error:
                return "map", f"segment of rank {rank} ({offer['path']}): {error.strerror}; ranks must share one /dev/shm", False
            self._maps.append(segment)
            self._views.append(torch.frombuffer(segment, dtype=torch.uint8))
        return None

    @property
    def bases(self) -> list[int]:
        return [view.data_ptr() for view in self._views]

    def tensor(self, owner: int, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A view of a region of `owner`'s segment as a tensor."""
        count = torch.Size(shape).numel() * dtype.itemsize
        return self._views[owner][offset:offset + count].view(dtype).view(shape)

    def close(self) -> None:
        """Drops the mappings (memory goes when the last view does). Safe to call again."""
        self._views.clear()
        self._maps.clear()
