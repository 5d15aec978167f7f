"""Symmetric memory of the CPU backend: one POSIX shared-memory segment per rank, mapped by all ranks of the group.

Setting up goes in steps (allocate, exchange, map, confirm). A rank that fails in one tells the others, so all ranks end
with the first failure instead of waiting for each other. Names are unlinked as soon as every rank has the segment open;
what a killed process may leave before that is removed by the next set-up.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
from pathlib import Path

import torch

from moe_tk.errors import CapacityError, MoETkError
from moe_tk.group import RankGroup
from moe_tk.liveness import ProcessName, own_process, pid_namespace

SHM_DIR = Path("/dev/shm")
PREFIX = "moe_tk"
_counter = itertools.count()


def remove_stale_segments() -> None:
    """Unlinks segments of processes that are gone (killed between creating and unlinking theirs). Those of other pid
    namespaces stay: whether their processes live cannot be seen from here."""
    for path in SHM_DIR.glob(f"{PREFIX}.{pid_namespace()}.*.*.*"):
        try:
            owner = ProcessName.parse(path.name.removeprefix(f"{PREFIX}.").rpartition(".")[0])
        except ValueError:
            continue  # not a name of ours
        if owner.gone:
            with contextlib.suppress(OSError):  # another user's: theirs to remove
                path.unlink()


class ShmHeap:
    """Segments of all ranks of a group, each `size` bytes and zeroed. `bases[r]` is where rank r's is mapped here."""

    def __init__(self, group: RankGroup, size: int, *, tag: str, timeout_s: float) -> None:
        """A collective. `tag` names what the memory is for: it must be equal on all ranks, as must `size`.

        Raises MoETkError (CapacityError when /dev/shm is too small) on all ranks if any rank fails.
        """
        self.group, self.size = group, size
        self._maps: list[mmap.mmap] = []
        self._views: list[torch.Tensor] = []
        path = SHM_DIR / f"{PREFIX}.{own_process()}.{next(_counter)}"
        own_fd = -1
        try:
            with group.local_step("symmetric memory: allocate", timeout_s=timeout_s):
                remove_stale_segments()
                own_fd = self._create(path)
                self._reserve(own_fd)
            offers = group.gather((str(path), size, tag), timeout_s=timeout_s, step="symmetric memory: exchange")
            self._check_offers(offers)
            with group.local_step("symmetric memory: map", timeout_s=timeout_s):
                self._map_all([offer[0] for offer in offers], own_fd)
            group.gather(None, timeout_s=timeout_s, step="symmetric memory: confirm")
        except BaseException:
            self.close()
            remove_stale_segments()  # that of a rank that died in here
            raise
        finally:
            path.unlink(missing_ok=True)
            if own_fd >= 0:
                os.close(own_fd)

    @staticmethod
    def _create(path: Path) -> int:
        try:
            return os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        except OSError as error:
            raise MoETkError(f"{SHM_DIR} cannot be written: {error.strerror}; ranks exchange data through it") from error

    def _reserve(self, fd: int) -> None:
        """Reserves and zeroes the segment: a full /dev/shm is an error here, not a bus error later."""
        try:
            os.posix_fallocate(fd, 0, self.size)
        except OSError as error:
            stat = os.statvfs(SHM_DIR)
            raise CapacityError(f"{self.size / 2**20:.1f} MiB in {SHM_DIR}: {error.strerror} "
                                f"({stat.f_bavail * stat.f_frsize / 2**20:.0f} MiB free; lower max_tokens_per_rank or enlarge it, "
                                "in a container with --shm-size)") from error

    @staticmethod
    def _check_offers(offers: list[tuple[str, int, str]]) -> None:
        """The same error on all ranks when they do not set up the same."""
        for rank, (_, size, tag) in enumerate(offers):
            if (size, tag) != offers[0][1:]:
                raise MoETkError(f"symmetric memory: rank 0 set up {offers[0][2]} with {offers[0][1]} bytes but rank {rank} set up "
                                 f"{tag} with {size} bytes: all ranks must create the same layers and calls in the same order")

    def _map_all(self, paths: list[str], own_fd: int) -> None:
        for rank, path in enumerate(paths):
            try:
                fd = own_fd if rank == self.group.rank else os.open(path, os.O_RDWR)
                try:
                    segment = mmap.mmap(fd, self.size)
                finally:
                    if fd != own_fd:
                        os.close(fd)
            except OSError as error:
                raise MoETkError(f"segment of rank {rank} ({path}): {error.strerror}; ranks must share one {SHM_DIR}") from error
            self._maps.append(segment)
            self._views.append(torch.frombuffer(segment, dtype=torch.uint8))

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
