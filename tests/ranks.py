"""Ranks for tests: processes that stay up between tests, each job watched, and checked for what it leaves behind.

A job is a module-level function target(rank, world, ...) that every rank calls; modules with such functions import no
pytest, since every rank loads them. After a job no workspace, mapping or watch thread may be left in any rank.
"""

from __future__ import annotations

import gc
import multiprocessing
import multiprocessing.connection
import os
import pickle
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from moe_tk.memory.shm import PREFIX, SHM_DIR
from moe_tk.runtime.host import host_module
from moe_tk.runtime.launcher import Outcome, RankProcesses

JOB_LIMIT_S = 60.0
GRACE_S = 2.0  # for the other ranks, once one has failed
KEPT = ("MOE_TK_CACHE_DIR",)


class RanksFailed(AssertionError):
    """A rank raised, died, left something behind, or did not end in time; the text has every rank's traceback."""


def segments_of(pids: list[int]) -> list[str]:
    """Names in /dev/shm that these processes made."""
    wanted = {str(pid) for pid in pids}
    return [path.name for path in SHM_DIR.glob(f"{PREFIX}.*.*.*.*") if path.name.split(".")[2] in wanted]


def leftovers() -> list[str]:
    """What this process still holds of moe_tk: workspaces, mapped segments, watch threads."""
    from moe_tk.ops import release_ops_memory
    from moe_tk.runtime.session import _live

    release_ops_memory()
    gc.collect()
    mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if f"{SHM_DIR}/{PREFIX}." in line]
    threads = [thread.name for thread in threading.enumerate() if thread.name.startswith("moe_tk")]
    return [f"session {session.geometry}" for session in _live] + mapped + threads


def gone(pid: int) -> bool:
    """Whether a process has ended."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


@contextmanager
def rank_environment(folder: Path) -> Iterator[None]:
    """The environment in which ranks start: none of the caller's moe_tk variables, records in `folder`, a short set-up limit."""
    before = dict(os.environ)
    for name in [name for name in os.environ if name.startswith("MOE_TK_") and name not in KEPT]:
        del os.environ[name]
    os.environ.update(MOE_TK_RECORD_DIR=str(folder), MOE_TK_FIRST_CALL_TIMEOUT_S="30", GLOO_SOCKET_IFNAME="lo")
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _serve(rank: int, world: int, pipes: list[Any]) -> None:
    """What a rank of a pool does: jobs, until None or the end of the pipe."""
    for other, pipe in enumerate(pipes):
        if other != rank:
            pipe.close()
    gc.collect()
    gc.freeze()  # what is there by now need not be looked through after every job
    while True:
        try:
            blob = pipes[rank].recv_bytes()
        except EOFError:
            return
        job = None
        try:
            job = pickle.loads(blob)
            if job is None:
                return
            target, args, named = job
            answer = ("value", target(rank, world, *args, **named))
        except BaseException:
            answer = ("error", traceback.format_exc())
        left = leftovers() if answer[0] == "value" else []
        pipes[rank].send(("error", f"left behind by {job}: {left}") if left else answer)


class Pool:
    """`world` ranks that wait for jobs."""

    def __init__(self, world: int, folder: Path) -> None:
        context = multiprocessing.get_context("forkserver")
        pairs = [context.Pipe() for _ in range(world)]
        self.pipes = [mine for mine, _ in pairs]
        with rank_environment(folder):
            self.ranks = RankProcesses(world, _serve, [theirs for _, theirs in pairs], timeout_s=600.0)
        self.pids = [process.pid for process in self.ranks.processes]
        for _, theirs in pairs:
            theirs.close()

    def run(self, target: Callable, args: tuple, named: dict[str, Any], limit_s: float) -> list[Any]:
        """Results of all ranks. Raises RanksFailed; the pool is of no use afterwards."""
        blob = pickle.dumps((target, args, named))
        for pipe in self.pipes:
            pipe.send_bytes(blob)
        answers: dict[int, tuple[str, Any]] = {}
        deadline = time.monotonic() + limit_s
        while len(answers) < len(self.pipes) and time.monotonic() < deadline:
            waiting = [pipe for rank, pipe in enumerate(self.pipes) if rank not in answers]
            for pipe in multiprocessing.connection.wait(waiting, timeout=max(0.0, deadline - time.monotonic())):
                rank = self.pipes.index(pipe)
                try:
                    answers[rank] = pipe.recv()
                except (EOFError, ConnectionResetError):
                    answers[rank] = ("error", "the process died")
                if answers[rank][0] == "error":
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        failed = [f"rank {rank}: {text}" for rank, (kind, text) in sorted(answers.items()) if kind == "error"]
        silent = [rank for rank in range(len(self.pipes)) if rank not in answers]
        if failed or silent:
            raise RanksFailed("\n".join([*failed, *(f"rank {rank}: did not end in time" for rank in silent)]))
        return [answers[rank][1] for rank in range(len(self.pipes))]

    def close(self, *, kindly: bool = True) -> None:
        """Ends the ranks, by a last message or (after a failure) at once; asserts that no process and no segment is left."""
        if kindly:
            for pipe in self.pipes:
                pipe.send_bytes(pickle.dumps(None))
            for process in self.ranks.processes:
                process.join(5)
        self.ranks.__exit__()
        assert_nothing_left(self.pids)


class Pools:
    """Pools by world size, started on first use and kept while their jobs end well."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._pools: dict[int, Pool] = {}

    def run(self, world: int, target: Callable, *args: Any, limit_s: float = JOB_LIMIT_S, **named: Any) -> list[Any]:
        """[target(rank, world, *args, **named) of every rank]. Raises RanksFailed if any rank fails, hangs or leaves something."""
        host_module()  # built here, so that no rank's time goes into the compiler
        if world not in self._pools:
            self._pools[world] = Pool(world, self.folder)
        try:
            return self._pools[world].run(target, args, named, limit_s)
        except RanksFailed:
            self._pools.pop(world).close(kindly=False)
            raise

    def fresh(self, world: int, target: Callable, *args: Any, limit_s: float = JOB_LIMIT_S) -> list[Outcome]:
        """Outcomes of ranks that run target only: for jobs that leave their process group in no state to go on."""
        host_module()
        with rank_environment(self.folder), RankProcesses(world, target, *args, timeout_s=limit_s) as ranks:
            pids = [process.pid for process in ranks.processes]
            outcomes = ranks.outcomes()
        assert_nothing_left(pids)
        return outcomes

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()


def assert_nothing_left(pids: list[int]) -> None:
    """No process and no shared-memory segment of these ranks may be left."""
    alive = [pid for pid in pids if not gone(pid)]
    assert not alive, f"processes are left: {alive}"
    assert segments_of(pids) == []
