"""Who the processes of a group are, and whether they are still there. Processes of other pid namespaces cannot be seen."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


def process_start(pid: int) -> str | None:
    """Start time of a process in clock ticks (tells a reused pid from the old one); None if it is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = stat[stat.rindex(")") + 2:].split()
    return None if fields[0] in "ZX" else fields[19]


def pid_namespace() -> int:
    """Number of this process's pid namespace."""
    return os.stat("/proc/self/ns/pid").st_ino


@dataclass(frozen=True)
class ProcessName:
    """A process of this machine, for good: no later one has the same."""

    namespace: int
    pid: int
    start: str

    def __str__(self) -> str:
        return f"{self.namespace}.{self.pid}.{self.start}"

    @classmethod
    def parse(cls, text: str) -> ProcessName:
        """Inverse of str()."""
        namespace, pid, start = text.split(".")
        return cls(int(namespace), int(pid), start)

    @property
    def visible(self) -> bool:
        """Whether this process can tell if that one lives."""
        return self.namespace == pid_namespace()

    @property
    def gone(self) -> bool:
        """Whether it has ended; False also where that cannot be seen."""
        return self.visible and process_start(self.pid) != self.start


def own_process() -> ProcessName:
    """The name of this process."""
    return ProcessName(pid_namespace(), os.getpid(), process_start(os.getpid()) or "")
