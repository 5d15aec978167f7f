"""A session of the CUDA back end: one workspace over NVLink with what makes calls on it safe. Shared by all layers of one
(group, geometry, device). Calls are asynchronous, so a failure is raised by the next call or by synchronize()."""

from __future__ import annotations

import atexit
import struct
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn

import torch

from moe_tk.config import env
from moe_tk.errors import ArgumentError, CapacityError, MoETkError, PeerRefused
from moe_tk.group import RankGroup
from moe_tk.memory.nvlink import NvlinkWorkspace
from moe_tk.memory.nvlink_layout import OPEN_CLUSTER, NvlinkGeometry
from moe_tk.runtime.faults import error_from, readable
from moe_tk.runtime.nvlink import nvlink_module
from moe_tk.runtime.records import write_records
from moe_tk.runtime.session_cache import SessionCache, Wanted
from moe_tk.runtime.stamps import StampBuffer
from moe_tk.runtime.watch import LivenessWatch

RECORD_GRACE_S = 0.3  # how long to wait for the other ranks' records before the error is written
RECORD = struct.Struct("<3I4i4I4x2Q")  # protocol::wait_record
RECORDS_OFFSET = 384                   # of control_block
RECORD_FIELDS = ("op", "phase", "role", "rank", "block", "slot", "producer", "expected", "seen", "kind", "epoch", "waited_ns",
                 "missing")
FAILED, VOID_REASON, VOID_RANK, VOID_VALUE, LOST_LOW, LOST_HIGH, HOST_ABORT = range(7)  # nvlink::mailbox, in int32
REFUSED, DISAGREE, CAPACITY = 1, 2, 3  # nvlink::void_reason
OPEN, GATHER, SCATTER, PULL, GEMM1, GEMM2, COMBINE = (1 << bit for bit in range(7))  # nvlink::stage_bit
STAGES = {"two_kernel": OPEN | GATHER | SCATTER, "serial": OPEN | PULL | GEMM1 | GEMM2 | COMBINE}  # of a call, by pattern
_live: weakref.WeakSet[NvlinkSession] = weakref.WeakSet()


def too_many_tokens(op: str, rank: int, num_tokens: int, limit: int) -> CapacityError:
    """What all ranks raise when a rank has more tokens than the buffers hold."""
    return CapacityError(f"{op}: rank {rank} had {num_tokens} tokens, more than max_tokens_per_rank={limit}. Nothing was "
                         f"computed; make the layer with max_tokens_per_rank >= {num_tokens}.")


def note_lost(mail: Any, rank: int) -> None:
    """Tells the kernels, by the mailbox (int32), that the process of a rank is gone."""
    mail[LOST_LOW + rank // 32] |= 1 << rank % 32 if rank % 32 < 31 else -(1 << 31)


def usable_sms(sms: int, reserve_sms: int) -> int:
    """Blocks of a launch: whole clusters, of which one builds the tables and at least one sends rows."""
    least = 2 * OPEN_CLUSTER
    if sms - reserve_sms < least:
        raise ArgumentError(f"reserve_sms is {reserve_sms}, wanted at most {max(0, sms - least)}: the launches need {least} of the "
                            f"{sms} multiprocessors")
    return sms - reserve_sms


class NvlinkSession:
    """Calls on one workspace: one at a time, in the same order on all ranks, every wait bounded."""

    WORKSPACE: type[NvlinkWorkspace] = NvlinkWorkspace
    NATIVE = "Workspace"  # class of the module with the launches

    def __init__(self, group: RankGroup, geometry: NvlinkGeometry, *, device: torch.device, generation: int, reserve_sms: int,
                 timeout_s: float, traced: bool = False) -> None:
        """A collective. timeout_s bounds the set-up; calls have their own limit. reserve_sms are left to other streams. traced: the
        kernels record what they do in `stamps`, which is None otherwise."""
        self.group, self.geometry, self.device, self.generation = group, geometry, device, generation
        self.poisoned: str | None = None
        self.num_layers = 0
        self._last_stream: torch.cuda.Stream | None = None
        self._lock = threading.Lock()
        with torch.cuda.device(device):
            self.workspace = self.WORKSPACE(group, geometry, device=device, generation=generation, timeout_s=timeout_s)
            with group.local_step("workspace: native part", timeout_s=timeout_s):
                self.num_sms = usable_sms(torch.cuda.get_device_properties(device).multi_processor_count, reserve_sms)
                module, fields = nvlink_module(traced), self.workspace.fields(self.num_sms)
            self.stamps = StampBuffer(group, module, device=device, num_sms=self.num_sms, timeout_s=timeout_s) if traced else None
            with group.local_step("workspace: launches", timeout_s=timeout_s):
                self.native = getattr(module, self.NATIVE)({**fields, **self.stamps.fields()} if self.stamps else fields)
        self._mail = self.workspace.mailbox.numpy()
        # Not a method: the watch's thread would keep this session, and its memory, for ever.
        self.watch = LivenessWatch(group, partial(note_lost, self._mail), timeout_s=timeout_s)
        group.gather(None, timeout_s=timeout_s, step="workspace: all ranks are ready")  # kernels are loaded everywhere
        _live.add(self)

    def add_layer(self) -> int:
        """Ordinal of a new layer on this session; layers are made in the same order on all ranks."""
        self.num_layers += 1
        return self.num_layers

    @contextmanager
    def one_call(self, op: str, timeout_s: float) -> Iterator[None]:
        """Holds the session while a call is launched. Raises what an earlier call failed with, and MoETkError when it is
        poisoned or another thread launches a call."""
        if self.poisoned:
            raise MoETkError(f"{op}: this layer's workspace is unusable since an earlier call failed: {self.poisoned}")
        if not self._lock.acquire(blocking=False):
            raise MoETkError(f"{op}: a call is being launched on this workspace already; one at a time is supported, also across "
                             "the layers that share it")
        try:
            if not torch.cuda.is_current_stream_capturing():
                self.check(op, timeout_s)
            yield
        finally:
            self._lock.release()

    def run(self, call: dict[str, Any], *, stages: int, timeout_s: float) -> None:
        """Launches stages of a call on the current stream of the session's device, behind the call before it. The order of
        graph replays on several streams is up to the caller."""
        stream = torch.cuda.current_stream(self.device)
        if not torch.cuda.is_current_stream_capturing():
            if self._last_stream is not None and self._last_stream != stream:
                stream.wait_stream(self._last_stream)  # calls share the workspace: never two at a time
            self._last_stream = stream
        self.native.run(call, stages=stages, timeout_s=timeout_s, stream=stream.cuda_stream)

    def check(self, op: str, timeout_s: float) -> None:
        """Raises what an earlier call of this rank failed with. Reads host memory only, waits for nothing.

        ProtocolTimeout and PeerLost make the session unusable; PeerRefused, CapacityError and MoETkError do not: the call
        was not computed on any rank and its result is NaN.
        """
        if self._mail[FAILED]:
            self._fail(op, timeout_s)
        reason, rank, value = (int(self._mail[i]) for i in (VOID_REASON, VOID_RANK, VOID_VALUE))
        if reason == 0:
            return
        self._mail[VOID_REASON] = 0
        if reason == REFUSED and rank == self.group.rank:
            return  # it has raised then
        if reason == CAPACITY or reason == REFUSED and value > self.geometry.max_tokens:
            raise too_many_tokens(op, rank, value, self.geometry.max_tokens)
        if reason == REFUSED:
            raise PeerRefused(f"{op}: rank {rank} refused an earlier call (its own exception says why). Nothing was computed; all "
                              "ranks may go on.")
        if reason == DISAGREE:
            raise MoETkError(f"{op}: ranks disagreed about an earlier call: rank {rank} made another one than rank 0. All ranks "
                             "must make the same calls with the same shapes in the same order. Nothing was computed.")

    def forget_verdict(self) -> None:
        """For a rank that refuses a call and raises: waits for that call, so that what all ranks found about it (perhaps that
        another rank refused it too) is not raised once more by the next one. Bounded; does nothing in a capture."""
        if not torch.cuda.is_current_stream_capturing():
            torch.cuda.current_stream(self.device).synchronize()
            self._mail[VOID_REASON] = 0

    def synchronize(self, op: str, timeout_s: float) -> None:
        """Waits for the current stream of the device and raises what its calls failed with. Bounded, since all waits are."""
        torch.cuda.current_stream(self.device).synchronize()
        if self.poisoned:
            raise MoETkError(f"{op}: this layer's workspace is unusable since an earlier call failed: {self.poisoned}")
        self.check(op, timeout_s)

    def records(self) -> list[dict]:
        """The wait records that ranks have filed here. Copies from the device."""
        item = self.workspace.region("control", torch.uint8).cpu().numpy().tobytes()
        found = []
        for rank in range(self.group.world):
            values = dict(zip(RECORD_FIELDS, RECORD.unpack_from(item, RECORDS_OFFSET + rank * RECORD.size), strict=True))
            if values["kind"]:
                values["seconds"] = values.pop("waited_ns") * 1e-9
                found.append(values)
        return found

    def _fail(self, op: str, timeout_s: float) -> NoReturn:
        records: list[dict] = []
        torch.cuda.synchronize(self.device)
        deadline = time.monotonic() + RECORD_GRACE_S
        while time.monotonic() < deadline:
            records = [readable(record) for record in self.records()]
            if len(records) + len(self.watch.dead) >= self.group.world:
                break
            time.sleep(0.01)
        dead = set(self.watch.dead)
        error = error_from(records, op=op, rank=self.group.rank, dead=dead, timeout_s=timeout_s)
        self.poisoned = str(error)
        path = write_records(records, op=op, rank=self.group.rank, world=self.group.world, dead=sorted(dead), message=str(error))
        if path:
            error.args = (f"{error} Who waited for whom: moe_tk explain-timeout {path}",)
        raise error

    def abort(self) -> None:
        """Ends all waits of this rank's kernels, and with them those of the peers."""
        self._mail[HOST_ABORT] = 1

    def close(self) -> None:
        """Ends the watch. Not a collective; the session is unusable afterwards."""
        self.poisoned = self.poisoned or "it was closed"
        self.watch.close()


class NvlinkSessionCache(SessionCache[NvlinkSession]):
    """Sessions of one class by (group, geometry, device, reserve_sms, traced)."""

    def __init__(self, kind: type[NvlinkSession] = NvlinkSession) -> None:
        super().__init__()
        self._kind = kind

    def get(self, group: RankGroup, geometry: NvlinkGeometry, *, device: torch.device, reserve_sms: int,
            traced: bool = False) -> NvlinkSession:
        """The session of (group, geometry, device). A collective; see SessionCache.agree."""
        limit = env("MOE_TK_FIRST_CALL_TIMEOUT_S")
        wanted = Wanted((geometry, device, reserve_sms, traced), (geometry.shared_key(), traced),
                        f"{geometry}{', traced' * traced}")
        return self.agree(group, wanted, prepare=lambda: nvlink_module(traced), timeout_s=limit,
                          make=lambda generation: self._kind(group, geometry, device=device, generation=generation,
                                                             reserve_sms=reserve_sms, timeout_s=limit, traced=traced))


NVLINK_SESSIONS = NvlinkSessionCache()


@atexit.register
def _close_all() -> None:
    for session in list(_live):
        session.close()
