"""What the ops of one group hold on a GPU: sessions by size, the order of their calls, and the failures of earlier ones.

Ranks do not talk before a call: they tell each other what they do in its first launch, where a call that differs is void on
all of them. So a workspace may be made only where all ranks make it, which follows from what they all know: the sizes that are
equal on all ranks, and the calls made so far.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from moe_tk.config import env
from moe_tk.errors import MoETkError
from moe_tk.group import RankGroup, group_is_gone, resolve_group
from moe_tk.runtime.nvlink_ops import OpsGeometry, OpsSession, make_session
from moe_tk.sizes import check_positive

_held: dict[tuple, GroupOps] = {}  # by group and device; ops have no object that could keep them alive


class GroupOps:
    """Sessions of one group on one GPU."""

    def __init__(self, group: RankGroup, device: torch.device) -> None:
        self.group, self.device, self.lock = group, device, threading.Lock()
        self._sessions: dict[Any, list[OpsSession]] = {}  # by all sizes but max_tokens; the latest is the largest
        self._latest: dict[str, OpsSession] = {}          # by op: where a rank that cannot make a call says so
        self._last_stream: torch.cuda.Stream | None = None

    def sessions(self) -> list[OpsSession]:
        return [session for sessions in self._sessions.values() for session in sessions]

    def check(self, op: str, timeout_s: float) -> None:
        """Raises what an earlier call failed with. Reads host memory only."""
        for session in self.sessions():
            if session.poisoned:
                raise MoETkError(f"{op}: the ops of this group are unusable since an earlier one failed: {session.poisoned} "
                                 "To start anew, call moe_tk.ops.release_ops_memory() on every rank.")
            session.check(op, timeout_s)

    def session(self, op: str, geometry: OpsGeometry, *, timeout_s: float) -> OpsSession:
        """The session for calls of up to geometry.max_tokens tokens, made with room for the next power of two. A collective
        where it is made."""
        found = self._sessions.setdefault(replace(geometry, max_tokens=1), [])
        if not found or found[-1].geometry.max_tokens < geometry.max_tokens:
            if torch.cuda.is_current_stream_capturing():
                raise MoETkError(f"{op}: a CUDA graph is being captured, but no earlier call made room for {geometry.max_tokens} "
                                 "tokens: make one call of this size before the capture")
            roomy = replace(geometry, max_tokens=1 << max(0, geometry.max_tokens - 1).bit_length())
            with torch.inference_mode(False):
                found.append(make_session(self.group, roomy, device=self.device, timeout_s=timeout_s))
        self._latest[op] = found[-1]
        return found[-1]

    def stream(self) -> torch.cuda.Stream:
        """The current stream of the device, behind the call before: two calls of a group never run at a time."""
        stream = torch.cuda.current_stream(self.device)
        if not torch.cuda.is_current_stream_capturing():
            if self._last_stream is not None and self._last_stream != stream:
                stream.wait_stream(self._last_stream)
            self._last_stream = stream
        return stream

    def refuse(self, op: str, error: Exception, *, timeout_s: float) -> None:
        """Tells the other ranks that this one cannot make the call: in the session of the last such call, or, before the first one,
        where they wait to make it. Waits until they have heard it."""
        session = self._latest.get(op)
        if session is not None:
            with torch.cuda.device(self.device):
                session.refuse(timeout_s=timeout_s, stream=self.stream())
                session.forget_verdict()
            return
        try:
            with self.group.local_step(op, timeout_s=timeout_s):
                raise error
        except type(error):
            pass  # the caller raises it

    def synchronize(self, timeout_s: float) -> None:
        """Waits for the calls so far and for what the current stream has replayed; raises what one of them failed with."""
        self.wait()
        torch.cuda.current_stream(self.device).synchronize()
        self.check("synchronize", timeout_s)

    def wait(self) -> None:
        """Waits for the calls so far. Bounded, since every wait of a call is."""
        if self._last_stream is not None:
            self._last_stream.synchronize()


@contextmanager
def one_call(op: str, group: RankGroup, device: torch.device, timeout_s: float | None) -> Iterator[tuple[GroupOps, float]]:
    """Around a call: (what the group holds, seconds). An exception before anything is launched is told to the other ranks."""
    ops = _ops_of(group, device)
    seconds = env("MOE_TK_TIMEOUT_S") if timeout_s is None else timeout_s
    if not ops.lock.acquire(blocking=False):
        raise MoETkError(f"{op}: another thread is launching an op of this group; one at a time is supported")
    try:
        with torch.cuda.device(device):
            if not torch.cuda.is_current_stream_capturing():
                ops.check(op, seconds)
            yield ops, seconds
    finally:
        ops.lock.release()


def checked(op: str, ops: GroupOps, timeout_s: float, check: Callable[[], Any]) -> Any:
    """check(), whose exception is told to the other ranks before it is raised."""
    try:
        check_positive("timeout_s", timeout_s, "seconds")
        return check()
    except Exception as error:  # whatever keeps this rank from taking part, the others must hear of it
        ops.refuse(op, error, timeout_s=env("MOE_TK_TIMEOUT_S"))
        raise


def _ops_of(group: RankGroup, device: torch.device) -> GroupOps:
    key = (group.name, id(group.process_group), device)
    if key not in _held:
        for old in [k for k in _held if group_is_gone(*k[:2])]:
            del _held[old]
        _held[key] = GroupOps(group, device)
    return _held[key]


def release() -> None:
    """Drops all sessions when their calls are done. Every rank of a group must do it, or none."""
    try:
        for ops in _held.values():
            ops.wait()
    finally:
        _held.clear()


def synchronize(group: Any = None, *, timeout_s: float | None = None) -> None:
    """Waits for the calls of this group's ops on GPUs and raises what one of them failed with: ProtocolTimeout, PeerLost (the ops
    are unusable from then on), PeerRefused, CapacityError or MoETkError (nothing was computed, the result is NaN).

    timeout_s is for the text of the error: every wait of a call is bounded already. On the CPU calls are not asynchronous and
    there is nothing to wait for.
    """
    ranks = resolve_group(group)
    seconds = env("MOE_TK_TIMEOUT_S") if timeout_s is None else timeout_s
    for (name, identity, _), ops in list(_held.items()):
        if (name, identity) == (ranks.name, id(ranks.process_group)):
            ops.synchronize(seconds)
