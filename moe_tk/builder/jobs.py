"""How many compiler processes may run at a time."""

from __future__ import annotations

import os
from pathlib import Path

GIB = 1 << 30
BUDGET_BYTES = {"host": 2 * GIB, "cuda": 4 * GIB}  # memory of one compiler process, generously


def count_jobs(cores: int, free_bytes: int, budget_bytes: int, *, own: int | None = None,
               bound: int | None = None) -> int:
    """min(cores, free memory / budget), at least 1.

    `own` (MOE_TK_BUILD_JOBS) takes the place of that number, `bound` (MAX_JOBS) caps either.
    """
    jobs = own if own is not None else min(cores, free_bytes // budget_bytes)
    if bound is not None:
        jobs = min(jobs, bound)
    return max(1, jobs)


def usable_cores() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except (AttributeError, OSError):
        return os.cpu_count() or 1


def free_memory() -> int:
    """Bytes that new processes can take without swapping, inside the limits of the container."""
    free = 4 * GIB  # where the system does not say
    for line in _read("/proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) * 1024
    for folder, limit, used, cache in (("/sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
                                       ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes",
                                        "total_inactive_file")):
        most, now = _read(f"{folder}/{limit}").strip(), _read(f"{folder}/{used}").strip()
        if most.isdigit() and now.isdigit():
            stat = dict(line.split() for line in _read(f"{folder}/memory.stat").splitlines())
            free = min(free, max(0, int(most) - int(now) + int(stat.get(cache, 0))))  # file cache gives way
    return free


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
