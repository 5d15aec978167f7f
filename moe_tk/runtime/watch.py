"""The liveness watch: tells the waits of this rank at once when the process of another rank is gone."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable

from moe_tk.group import RankGroup
from moe_tk.liveness import own_process


class LivenessWatch:
    """Watches the processes of the other ranks through pidfds, in one daemon thread.

    on_death(rank) is called once per rank that is gone, also before the watch began. Ranks whose process cannot be seen from
    here (another pid namespace) are not watched: `unwatched` lists them; their death is found by the time-out, or at once
    when a rank that can see them says so.
    """

    def __init__(self, group: RankGroup, on_death: Callable[[int], None], *, timeout_s: float) -> None:
        """A collective: ranks tell each other who they are."""
        self.dead: set[int] = set()
        self.unwatched: list[int] = []
        self._on_death = on_death
        mine = own_process()
        self._process = mine.pid
        with group.local_step("liveness watch: pipe", timeout_s=timeout_s):
            self._stop_read, self._stop_write = os.pipe()
        try:
            people = group.gather(mine, timeout_s=timeout_s, step="liveness watch: exchange")
        except BaseException:
            os.close(self._stop_read)
            os.close(self._stop_write)
            raise
        self._ranks: dict[int, int] = {}  # pidfd -> rank
        for rank, process in enumerate(people):
            if process == mine:
                continue
            try:
                pidfd = os.pidfd_open(process.pid) if process.visible else -1
            except OSError:
                pidfd = -1
            if process.gone:  # asked after pidfd_open: now the pidfd is of that process and no later one
                self._note(rank)
            elif pidfd < 0:
                self.unwatched.append(rank)
            else:
                self._ranks[pidfd] = rank
                continue
            if pidfd >= 0:
                os.close(pidfd)
        self._thread = threading.Thread(target=self._run, name="moe_tk liveness", daemon=True)
        self._thread.start()

    def _note(self, rank: int) -> None:
        self.dead.add(rank)
        self._on_death(rank)

    def _run(self) -> None:
        poller = select.poll()
        for fd in [self._stop_read, *self._ranks]:
            poller.register(fd, select.POLLIN)
        while self._stop_write >= 0:
            for fd, _ in poller.poll():
                if fd == self._stop_read:
                    return
                poller.unregister(fd)
                self._note(self._ranks[fd])

    def close(self) -> None:
        """Ends the thread. Safe to call again, from interpreter exit, from the thread itself (where a garbage collection may
        end a session), and in a forked process, where it leaves the thread of the parent alone."""
        if self._stop_write < 0:
            return
        if os.getpid() == self._process:
            os.write(self._stop_write, b"x")
            if threading.current_thread() is not self._thread:
                self._thread.join(timeout=1.0)
        for fd in [self._stop_read, self._stop_write, *self._ranks]:
            os.close(fd)
        self._stop_write = -1
