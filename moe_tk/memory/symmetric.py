"""What every kind of symmetric memory offers: shared memory on the CPU, peer-mapped device memory on GPUs."""

from __future__ import annotations

from typing import Protocol

import torch

from moe_tk.group import RankGroup


class SymmetricMemory(Protocol):
    """One zeroed segment of `size` bytes per rank of `group`, each mapped by all ranks."""

    group: RankGroup
    size: int

    @property
    def bases(self) -> list[int]:
        """Address of every rank's segment in this process, in rank order."""

    def tensor(self, owner: int, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A region of `owner`'s segment as a tensor."""

    def close(self) -> None:
        """Gives the mappings up. Not a collective."""
