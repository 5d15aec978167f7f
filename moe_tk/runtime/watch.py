"""The liveness watch: tells the waits of this rank at once when the process of another rank is gone."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable

from moe_tk.group import RankGroup
from moe_tk.memory.shm import process_start


class LivenessWatch:
    """Watches the processes of the other ranks through pidfds, in one daemon thread.

    on_death(rank) is called once per rank that is gone. Ranks whose process cannot be seen from here (another pid
    namespace or host) are not watched: `unwatched` lists them, and their death is found by the time-out only.
    """

    def __init__(self, group: RankGroup, on_death: Callable[[int], None], *, timeout_s: float) -> None:
        """A collective: ranks tell each other who they are."""
        self.dead: set[int] = set()
        self.unwatched: list[int] = []
        self._on_death = on_death
        mine = (os.getpid(), process_start(os.getpid()))
        people = group.gather(mine, timeout_s=timeout_s, step="liveness watch: exchange")
        self._ranks: dict[int, int] = {}  # pidfd -> rank
        for rank, (pid, start) in enumerate(people):
            if rank == group.rank or (pid, start) == mine:
                continue
            try:
                pidfd = os.pidfd_open(pid)
            except OSError:
                self.unwatched.append(rank)
                continue
            if process_start(pid) != start:
                os.close(pidfd)
                self.unwatched.append(rank)
                continue
            self._ranks[pidfd] = rank
        self._stop_read, self._stop_write = os.pipe()
        self._thread = threading.Thread(target=self._run, name="moe_tk liveness", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        poller = select.poll()
        for fd in [self._stop_read, *self._ranks]:
            poller.register(fd, select.POLLIN)
        while True:
            for fd, _ in poller.poll():
                if fd == self._stop_read:
                    return
                poller.unregister(fd)
                self.dead.add(self._ranks[fd])
                self._on_death(self._ranks[fd])

    def close(self) -> None:
        """Ends the thread. Safe to call again, and from interpreter exit."""
        if self._stop_write < 0:
            return
        os.write(self._stop_write, b"x")
        self._thread.join(timeout=1.0)
        for fd in [self._stop_read, self._stop_write, *self._ranks]:
            os.close(fd)
        self._stop_write = -1
