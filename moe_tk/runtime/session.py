"""A session: one workspace with everything that makes calls on it safe. Shared by all layers of one (group, geometry)."""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from moe_tk.config import env
from moe_tk.errors import CapacityError, MoETkError, PeerRefused
from moe_tk.group import RankGroup
from moe_tk.memory.geometry import Geometry
from moe_tk.memory.workspace import Workspace
from moe_tk.runtime.faults import OPS, error_from, op_code, readable
from moe_tk.runtime.host import host_module
from moe_tk.runtime.records import write_records
from moe_tk.runtime.session_cache import SessionCache, Wanted
from moe_tk.runtime.watch import LivenessWatch

EXIT_GRACE_S = 1.0    # how long the end of the program waits for a call in another thread
RECORD_GRACE_S = 0.3  # how long to wait for the other ranks' records before the error is written
_live: weakref.WeakSet[Session] = weakref.WeakSet()


@dataclass(frozen=True)
class CallHeader:
    """What every rank says before anything is moved. signature and layer must be equal on all ranks."""

    op: str
    layer: int
    signature: int
    num_tokens: int


class Session:
    """Calls on one workspace: one in flight, in the same order on all ranks, every wait bounded."""

    def __init__(self, group: RankGroup, geometry: Geometry, *, generation: int, timeout_s: float) -> None:
        """A collective. timeout_s bounds the set-up; calls have their own limit."""
        self.group, self.geometry, self.generation = group, geometry, generation
        self.poisoned: str | None = None
        self.num_layers = 0
        self._lock = threading.Lock()
        self._open = False  # from the exchange of a call to the end of its last launch
        self._closed = False
        self._process = os.getpid()
        self.workspace = Workspace(group, geometry, generation=generation, timeout_s=timeout_s)
        with group.local_step("workspace: native part", timeout_s=timeout_s):
            self.native = host_module().Rank(self.workspace.heap_fields(), self.workspace.counter_fields(),
                                             self.workspace.epoch_address)
        self.watch = LivenessWatch(group, self.native.note_lost, timeout_s=timeout_s)
        _live.add(self)

    def add_layer(self) -> int:
        """Ordinal of a new layer on this session; layers are made in the same order on all ranks."""
        self.num_layers += 1
        return self.num_layers

    @contextmanager
    def one_call(self, op: str) -> Iterator[None]:
        """Holds the session for one call. Raises MoETkError when it is poisoned, has a call in flight, or was made by a process
        that this one was forked from.

        An exception that leaves the block while a call is open (from its exchange to its last launch) ends the call on all
        ranks: the session is poisoned and the others are told.
        """
        if self._process != os.getpid():
            raise MoETkError(f"{op}: this layer belongs to process {self._process}, from which this one ({os.getpid()}) was "
                             "forked: only that one can call it")
        if self.poisoned:
            raise MoETkError(f"{op}: this layer's workspace is unusable since an earlier call failed: {self.poisoned}")
        if not self._lock.acquire(blocking=False):
            raise MoETkError(f"{op}: a call is in flight on this workspace already; one at a time is supported, also across "
                             "the layers that share it")
        try:
            yield
            self._open = False
        except BaseException as error:
            if self._open:
                self._abandon(op, error)
            raise
        finally:
            self._lock.release()

    def open_call(self, header: CallHeader, *, timeout_s: float, refused: str = "", topk_ids: torch.Tensor | None = None,
                  topk_weights: torch.Tensor | None = None, any_size: bool = False) -> list[int]:
        """Tells all ranks about this call and learns about theirs: returns the number of tokens of each rank.

        refused       this rank will raise: tells the others why instead of leaving them waiting
        topk_ids      [T, k] int32 contiguous; topk_weights [T, k] float32 contiguous
        any_size      nothing will be moved on this session: do not hold the sizes against its capacity
        Raises, on every rank alike and with nothing lost: PeerRefused, CapacityError, MoETkError (different calls).
        Raises ProtocolTimeout or PeerLost when a rank does not come.
        """
        no_routing = refused or topk_ids is None
        refused = refused.encode("ascii", "replace").decode()  # the header's text has a byte limit: no character may be cut
        self._open = True
        headers = self.native.exchange(
            op=op_code(header.op), layer=header.layer, signature=header.signature & (2**64 - 1), num_tokens=header.num_tokens,
            refused=refused, topk_ids=0 if no_routing else topk_ids.data_ptr(),
            topk_weights=0 if no_routing else topk_weights.data_ptr(), top_k=self.geometry.top_k, timeout_s=timeout_s)
        if headers is None:
            self.fail(header.op, timeout_s)
        error = None if refused else self._disagreement(header, headers, any_size)
        if refused or error:
            self.close_void()
        if error:
            raise error
        return [h[0] for h in headers]

    def _disagreement(self, header: CallHeader, headers: list[tuple], any_size: bool) -> MoETkError | None:
        """The error that the headers of all ranks amount to; the same on every rank that did not refuse."""
        for rank, (_, _, _, _, refused, text) in enumerate(headers):
            if refused:
                return PeerRefused(f"{header.op}: rank {rank} refused this call: {text}. Nothing was computed; all ranks may go "
                                   "on.")
        for rank, (_, signature, op, layer, _, _) in enumerate(headers):
            if (signature, op, layer) != headers[0][1:4]:
                mine, theirs = self._describe(headers[0]), self._describe(headers[rank])
                return MoETkError(f"ranks disagree about the call: rank 0 made {mine}, rank {rank} made {theirs}. All ranks must "
                                  "make the same calls with the same shapes in the same order. Nothing was computed.")
        limit = self.geometry.max_tokens
        over = [(rank, h[0]) for rank, h in enumerate(headers) if h[0] > limit]
        if over and not any_size:
            who = ", ".join(f"rank {rank}: {tokens}" for rank, tokens in over)
            return CapacityError(f"{header.op}: more tokens than max_tokens_per_rank={limit} ({who}). Nothing was computed; make "
                                 f"the layer with max_tokens_per_rank >= {max(t for _, t in over)}.")
        return None

    def close_void(self) -> None:
        """Ends an open call without any launch: the peers may go on."""
        self._open = False
        self.native.finish()

    @staticmethod
    def _describe(header: tuple) -> str:
        return f"{OPS[header[2]]} on layer {header[3]} with shapes {header[1]:#018x}"

    def fail(self, op: str, timeout_s: float) -> None:
        """Poisons the session and raises the error that the wait records amount to."""
        records: list[dict] = []
        deadline = time.monotonic() + RECORD_GRACE_S
        while time.monotonic() < deadline:
            records = [readable(r) for r in self.native.records()]
            if len(self.watch.dead | {record["rank"] for record in records}) >= self.group.world:
                break
            time.sleep(0.01)
        dead = set(self.watch.dead)
        error = error_from(records, op=op, rank=self.group.rank, dead=dead, timeout_s=timeout_s)
        self.poisoned = str(error)
        path = write_records(records, op=op, rank=self.group.rank, world=self.group.world, dead=sorted(dead), message=str(error))
        if path:
            error.args = (f"{error} Who waited for whom: moe_tk explain-timeout {path}",)
        raise error

    def _abandon(self, op: str, error: BaseException) -> None:
        """This rank cannot finish its call: stops the other ranks at once and poisons the session."""
        self._open = False
        if self.poisoned is None:
            self.poisoned = f"{op}: {type(error).__name__}: {error}"
            self.native.abort()

    def leave_call(self, reason: str) -> None:
        """Ends a call that is in flight in another thread, here and on the other ranks. A thread must not be inside the native
        module when the interpreter ends: what it would do on its way out ends the process with an abort."""
        if self._closed or self._process != os.getpid():
            return
        if not self._lock.acquire(blocking=False):
            self.poisoned = self.poisoned or reason
            self.native.abort()
            if not self._lock.acquire(timeout=EXIT_GRACE_S):
                return
        self._lock.release()

    def close(self) -> None:
        """Ends the watch and gives the memory up, unless a call is in flight. Not a collective; the session is unusable
        afterwards."""
        self.poisoned = self.poisoned or "it was closed"
        self.watch.close()
        self._closed = True
        if self._lock.acquire(blocking=False):  # for good: nothing may touch the memory any more
            self.workspace.close()


class HostSessionCache(SessionCache[Session]):
    """Sessions by (group, geometry)."""

    def get(self, group: RankGroup, geometry: Geometry, *, timeout_s: float | None = None) -> Session:
        """The session of (group, geometry). A collective; see SessionCache.agree."""
        limit = timeout_s or env("MOE_TK_FIRST_CALL_TIMEOUT_S")
        return self.agree(group, Wanted((geometry,), geometry.shared_key(), str(geometry)), prepare=host_module, timeout_s=limit,
                          make=lambda generation: Session(group, geometry, generation=generation, timeout_s=limit))


SESSIONS = HostSessionCache()


@atexit.register
def _close_all() -> None:
    for session in list(_live):
        session.leave_call("the program ended")
    for session in list(_live):
        session.close()
