"""Objects between the ranks of a group, without touching a GPU: over gloo, whatever backend the group has."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from moe_tk.errors import MoETkError, TopologyError

T = TypeVar("T")


class Ranks:
    """The ranks of a process group, for exchanging Python objects on the host."""

    def __init__(self, group: Any) -> None:
        import torch.distributed as dist

        self._dist, self._group = dist, group
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)

    def all(self, mine: Any) -> list[Any]:
        """Every rank's object, in rank order."""
        found: list[Any] = [None] * self.world
        self._dist.all_gather_object(found, mine, group=self._group)
        return found

    def from_first(self, make: Callable[[], T]) -> T:
        """What rank 0 makes, on every rank. If it fails there, every rank raises the same error."""
        box: list[Any] = [None]
        if self.rank == 0:
            try:
                box = [("made", make())]
            except MoETkError as error:
                box = [("failed", error)]
            except Exception as error:  # others must not wait for a rank that died
                box = [("failed", TopologyError(f"rank 0 could not make the report: {type(error).__name__}: {error}"))]
        self._dist.broadcast_object_list(box, src=self._dist.get_global_rank(self._group, 0), group=self._group)
        how, value = box[0]
        if how == "failed":
            raise value
        return value


@contextlib.contextmanager
def gather(group: Any) -> Iterator[Ranks]:
    """Ranks of a ProcessGroup or one-dimensional DeviceMesh.

    A group of another backend gets a gloo group beside it for the time being: NCCL would need the GPUs, and fails in
    its own words when two ranks share one, which is what we want to say first.
    """
    import torch.distributed as dist

    if hasattr(group, "get_group"):
        group = group.get_group()
    if "gloo" in dist.get_backend(group):
        yield Ranks(group)
        return
    members = dist.get_process_group_ranks(group)
    beside = dist.new_group(members, backend="gloo", use_local_synchronization=True)
    try:
        yield Ranks(beside)
    finally:
        dist.destroy_process_group(beside)
