"""BLD-13: how many compilers run at a time."""

from __future__ import annotations

import json

import pytest
from build_helpers import write_program

from moe_tk.builder import jobs
from moe_tk.builder.build import build_host_module
from moe_tk.builder.jobs import BUDGET_BYTES, GIB, count_jobs
from moe_tk.errors import ArgumentError


@pytest.mark.parametrize(("cores", "free_gib", "budget_gib", "wanted"), [
    (20, 24, 8, 3), (20, 24, 2, 12), (2, 24, 2, 2), (20, 1, 2, 1), (1, 0, 2, 1), (64, 512, 4, 64),
])
def test_bld_13_cores_and_free_memory_decide(cores, free_gib, budget_gib, wanted):
    assert count_jobs(cores, free_gib * GIB, budget_gib * GIB) == wanted


def test_bld_13_variables():
    assert count_jobs(20, 24 * GIB, 2 * GIB, bound=4) == 4
    assert count_jobs(2, 24 * GIB, 2 * GIB, bound=64) == 2  # MAX_JOBS is a maximum
    assert count_jobs(2, 1 * GIB, 2 * GIB, own=6) == 6      # our own number is taken as it is
    assert count_jobs(2, 1 * GIB, 2 * GIB, own=6, bound=3) == 3


def test_bld_13_container_limits_count(monkeypatch):
    files = {"/proc/meminfo": "MemTotal: 99 kB\nMemAvailable:   67108864 kB\n",
             "/sys/fs/cgroup/memory.max": f"{8 * GIB}\n", "/sys/fs/cgroup/memory.current": f"{5 * GIB}\n",
             "/sys/fs/cgroup/memory.stat": f"anon 1\ninactive_file {GIB}\n"}
    monkeypatch.setattr(jobs, "_read", lambda path: files.get(path, ""))
    assert jobs.free_memory() == 4 * GIB
    files["/sys/fs/cgroup/memory.max"] = "max\n"
    assert jobs.free_memory() == 64 * GIB
    files.clear()
    assert jobs.free_memory() >= BUDGET_BYTES["host"]


def test_bld_13_max_jobs_is_what_really_runs(mini_root, tmp_path, monkeypatch):
    """A compiler that notes how many of itself run; six sources, MAX_JOBS=2."""
    program = write_program(tmp_path / "bin" / "noting-g++", f"""#!/bin/sh
case " $* " in *" -c "*)
    echo $$ >'{tmp_path}'/running-$$; ls '{tmp_path}' | grep -c running- >>'{tmp_path}/seen'; sleep 0.3
    rm '{tmp_path}'/running-$$;; esac
exec g++ "$@"
""")
    monkeypatch.setenv("CXX", str(program))
    monkeypatch.setenv("MOE_TK_BUILD_JOBS", "4")
    monkeypatch.setenv("MAX_JOBS", "2")
    names = ["mini.cpp", *(f"part{i}.cpp" for i in range(5))]
    for name in names[1:]:
        (mini_root / name).write_text("\n")
    path = build_host_module("mini", names, root=mini_root)
    assert max(int(line) for line in (tmp_path / "seen").read_text().split()) == 2
    assert len(json.loads(path.with_suffix(".json").read_text())["commands"]) == 7


def test_bad_number_of_jobs_is_named(mini_root, monkeypatch):
    monkeypatch.setenv("MOE_TK_BUILD_JOBS", "many")
    with pytest.raises(ArgumentError, match="MOE_TK_BUILD_JOBS='many'"):
        build_host_module("mini", ["mini.cpp"], root=mini_root)
