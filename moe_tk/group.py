"""The ranks of a layer: a thin, bounded view of a ProcessGroup, a one-dimensional DeviceMesh, or a single process."""

from __future__ import annotations

import pickle
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from moe_tk import liveness
from moe_tk.errors import (
    ArgumentError,
    ArgumentTypeError,
    CapacityError,
    MoETkError,
    PeerLost,
    PeerRefused,
    ProtocolTimeout,
    TopologyError,
)

MESSAGE_BYTES = 8192  # of one rank's message in gather(); fixed, so that one collective is enough
LOOK_S = 0.05         # between two looks at whether all ranks still live
LAST_WORDS_S = 0.3    # for what a rank sent before it ended to go round
_announced: weakref.WeakSet[Any] = weakref.WeakSet()  # process groups in whose stores this process has said who it is


@dataclass(frozen=True, eq=False)
class RankGroup:
    """`world` ranks of which this process is number `rank`. `process_group` is None for a single process.

    rank is the rank in the group: neither the global rank nor a device index.
    """

    world: int
    rank: int
    name: str
    process_group: Any = field(default=None, repr=False)
    store: Any = field(default=None, repr=False)  # key-value store of the process group: says who the ranks are

    def gather(self, message: Any, *, timeout_s: float, step: str) -> list[Any]:
        """Every rank's `message` (any picklable object), in rank order. A collective: all ranks must call it.

        step      what is being done, for the error
        Raises ProtocolTimeout when a rank has not come after timeout_s, PeerLost when one died or a connection broke, and on
        all ranks but the failed one what local_step() of that rank had to tell.
        """
        envelopes = self._exchange((None, message), timeout_s=timeout_s, step=step)
        for rank, (failure, _) in enumerate(envelopes):
            if failure is not None:
                kind, where, text = failure
                raise kind(f"{where}: failed on rank {rank}: {text}")
        return [payload for _, payload in envelopes]

    @contextmanager
    def local_step(self, step: str, *, timeout_s: float) -> Iterator[None]:
        """For what a rank does alone between two gathers of a set-up: an exception that leaves the block is told to the other
        ranks, which raise in their next gather() instead of waiting for this one."""
        try:
            yield
        except Exception as error:
            kind = MoETkError
            if isinstance(error, CapacityError):
                kind = CapacityError
            elif isinstance(error, ArgumentError):
                kind = PeerRefused
            text = str(error) if isinstance(error, MoETkError) else f"{type(error).__name__}: {error}"
            try:
                self._exchange(((kind, step, text[:MESSAGE_BYTES // 8]), None), timeout_s=timeout_s, step=step)
            except Exception:
                pass  # the others are gone or not in a set-up: the first error is what counts
            raise

    def _exchange(self, envelope: tuple, *, timeout_s: float, step: str) -> list[tuple]:
        """Every rank's (failure or None, payload), in rank order."""
        if self.world == 1:
            return [envelope]
        blob = pickle.dumps(envelope)
        if len(blob) > MESSAGE_BYTES - 8:
            raise MoETkError(f"{step}: message of {len(blob)} bytes is longer than {MESSAGE_BYTES - 8}")
        padded = len(blob).to_bytes(8, "little") + blob.ljust(MESSAGE_BYTES - 8, b"\0")
        mine = torch.frombuffer(bytearray(padded), dtype=torch.uint8)
        everyone = [torch.empty(MESSAGE_BYTES, dtype=torch.uint8, device="cpu") for _ in range(self.world)]
        self.wait(lambda: dist.all_gather(everyone, mine, group=self.process_group, async_op=True), timeout_s=timeout_s, step=step)
        blobs = [bytes(tensor.tolist()) for tensor in everyone]
        return [pickle.loads(blob[8:8 + int.from_bytes(blob[:8], "little")]) for blob in blobs]

    def wait(self, start: Any, *, timeout_s: float, step: str) -> None:
        """Runs start() -> Work and waits for it, bounded. Errors as in gather()."""
        deadline, died = time.monotonic() + timeout_s, None
        try:
            work = start()
            while True:
                left = deadline - time.monotonic()
                try:
                    work.wait(timedelta(seconds=max(0.001, min(left, LOOK_S))))
                    return
                except RuntimeError:
                    if work.is_completed():  # failed, or done just after its slice of time was over
                        work.wait()
                        return
                    if left <= LOOK_S:
                        raise
                if died is None and (died := self._first_dead()) is not None:
                    deadline = min(deadline, time.monotonic() + LAST_WORDS_S)
        except RuntimeError as error:
            text = str(error)
            broken = "onnection" in text or "closed by peer" in text or "reset by peer" in text
            patience = time.monotonic() + (LAST_WORDS_S if broken else 0.0)  # a connection breaks before its process is gone
            while (died := self._first_dead()) is None and time.monotonic() < patience:
                time.sleep(0.01)
            if died is not None:
                raise PeerLost(f"{step}: rank {died} died (the process has ended) while rank {self.rank} of {self.world} waited "
                               "for it: rebuild the process group") from None
            if "imed out" in text or "imeout" in text:
                raise ProtocolTimeout(f"{step}: rank {self.rank} of {self.world} waited {timeout_s:g} s for the other "
                                      "ranks of the group. Is every rank making the same call?") from None
            if broken:
                raise PeerLost(f"{step}: rank {self.rank} of {self.world} lost its connection to another rank: {text}") from None
            raise

    def _first_dead(self) -> int | None:
        """The first rank whose process is known and gone."""
        for rank in range(self.world):
            key = f"moe_tk/process/{rank}"
            if rank != self.rank and self._tell_store("check", [key]):
                name = self._tell_store("get", key)
                if name and liveness.ProcessName.parse(name.decode()).gone:
                    return rank
        return None

    def _tell_store(self, verb: str, *arguments: Any) -> Any:
        """Result of a method of the store; None if there is no store (any more): its host may be the rank that died."""
        try:
            return getattr(self.store, verb)(*arguments) if self.store is not None else None
        except RuntimeError:
            return None


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
    if isinstance(group, int) and group == dist.GroupMember.NON_GROUP_MEMBER:
        raise TopologyError("this process is not a member of the group that was passed")
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
    found = RankGroup(world=dist.get_world_size(group), rank=rank, name=group.group_name, process_group=group,
                      store=_store_of(group))
    if group not in _announced:
        found._tell_store("set", f"moe_tk/process/{rank}", str(liveness.own_process()))
        _announced.add(group)
    return found


def _store_of(group: dist.ProcessGroup) -> Any:
    """The store that the group was made with; None where torch does not give it: then a death in a set-up is seen by the ranks
    that hold a connection to the dead one, and by the others when the time is over."""
    try:
        return dist.distributed_c10d._get_process_group_store(group)
    except (AttributeError, KeyError, RuntimeError):
        return None


def group_is_gone(name: str, identity: int) -> bool:
    """Whether the process group with this name and id() has been destroyed, or its name is another group's by now."""
    if identity == id(None):
        return False
    try:
        return id(torch.distributed.distributed_c10d._resolve_process_group(name)) != identity
    except (RuntimeError, ValueError, LookupError):
        return True
