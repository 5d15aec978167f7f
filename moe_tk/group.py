"""The ranks of a layer: a thin, bounded view of a ProcessGroup, a one-dimensional DeviceMesh, or a single process."""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from moe_tk.errors import ArgumentTypeError, MoETkError, PeerLost, ProtocolTimeout, TopologyError

MESSAGE_BYTES = 8192  # of one rank's message in gather(); fixed, so that one collective is enough


@dataclass(frozen=True, eq=False)
class RankGroup:
    """`world` ranks of which this process is number `rank`. `process_group` is None for a single process.

    rank is the rank in the group: neither the global rank nor a device index.
    """

    world: int
    rank: int
    name: str
    process_group: Any = field(default=None, repr=False)

    def gather(self, message: Any, *, timeout_s: float, step: str) -> list[Any]:
        """Every rank's `message` (any picklable object), in rank order. A collective: all ranks must call it.

        step      what is being done, for the error
        Raises ProtocolTimeout when a rank has not come after timeout_s, PeerLost when a connection broke.
        """
        if self.world == 1:
            return [message]
        blob = pickle.dumps(message)
        if len(blob) > MESSAGE_BYTES - 8:
            raise MoETkError(f"{step}: message of {len(blob)} bytes is longer than {MESSAGE_BYTES - 8}")
        mine = torch.zeros(MESSAGE_BYTES, dtype=torch.uint8)
        mine[:8] = torch.tensor(list(len(blob).to_bytes(8, "little")), dtype=torch.uint8)
        mine[8:8 + len(blob)] = torch.frombuffer(bytearray(blob), dtype=torch.uint8)
        all_messages = [torch.empty_like(mine) for _ in range(self.world)]
        self.wait(lambda: dist.all_gather(all_messages, mine, group=self.process_group, async_op=True),
                  timeout_s=timeout_s, step=step)
        return [pickle.loads(bytes(m[8:8 + int.from_bytes(bytes(m[:8].tolist()), "little")].tolist()))
                for m in all_messages]

    def wait(self, start: Any, *, timeout_s: float, step: str) -> None:
        """Runs start() -> Work and waits for it, bounded. Errors as in gather()."""
        try:
            start().wait(timedelta(seconds=timeout_s))
        except RuntimeError as error:
            text = str(error)
            if "imed out" in text or "imeout" in text:
                raise ProtocolTimeout(f"{step}: rank {self.rank} of {self.world} waited {timeout_s:g} s for the other "
                                      "ranks of the group. Is every rank making the same call?") from None
            if "onnection" in text or "closed by peer" in text or "reset by peer" in text:
                raise PeerLost(f"{step}: rank {self.rank} of {self.world} lost its connection to another rank: {text}") from None
            raise


SINGLE = RankGroup(world=1, rank=0, name="single")


def resolve_group(group: Any = None) -> RankGroup:
    """RankGroup of a ProcessGroup, a one-dimensional DeviceMesh, a RankGroup, or None.

    None means the default group if torch.distributed is initialised, else this process alone.
    Raises ArgumentTypeError for anything else, TopologyError when this process is not a member or when the group
    has no CPU back end to exchange set-up messages with.
    """
    if isinstance(group, RankGroup):
        return group
    if group is None:
        if not (dist.is_available() and dist.is_initialized()):
            return SINGLE
        group = dist.group.WORLD
    if hasattr(group, "get_group") and hasattr(group, "mesh"):
        if group.ndim != 1:
            raise ArgumentTypeError(f"group is a DeviceMesh of {group.ndim} dimensions, wanted one: pass mesh['name'] "
                                    "of the dimension that holds the ranks of the layer")
        group = group.get_group()
    if not isinstance(group, dist.ProcessGroup):
        raise ArgumentTypeError(f"group must be a ProcessGroup, a one-dimensional DeviceMesh or None, got "
                                f"{type(group).__name__}")
    rank = dist.get_rank(group)
    if rank < 0:
        raise TopologyError("this process is not a member of the group that was passed")
    try:
        group._get_backend(torch.device("cpu"))
    except RuntimeError:
        raise TopologyError("the group has no CPU back end: create it with backend='gloo' or 'cpu:gloo,cuda:nccl'") from None
    return RankGroup(world=dist.get_world_size(group), rank=rank, name=group.group_name, process_group=group)
