"""Jobs, slices, watermarks and the order of the combine role's list, by the kernels' own index arithmetic on this CPU."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from moe_tk.builder.toolchain import find_host_compiler

HERE = Path(__file__).parent
REPO = HERE.parents[1]
HEADER = "tk_kernels/nvlink/column_work.hpp"


def outcome(include: Path, folder: Path) -> subprocess.CompletedProcess:
    """Compiles the check with the headers below `include` and runs it."""
    choice = find_host_compiler()
    if choice.chosen is None:
        pytest.skip(f"no C++20 compiler: {choice.reason}")
    program = folder / "check"
    command = [*choice.chosen.command, "-std=c++20", "-O2", "-Wall", "-Wextra", "-Werror", f"-I{include}",
               str(HERE / "column_work_check.cpp"), "-o", str(program)]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return subprocess.run([str(program)], capture_output=True, text=True, timeout=120)


def test_every_sum_and_watermark_comes_once_and_no_two_ranks_wait_for_each_other(tmp_path):
    done = outcome(REPO, tmp_path)
    assert done.returncode == 0 and done.stdout == "ok\n", done.stdout


@pytest.mark.parametrize("right, wrong, text", [
    ("index * steps / slices * SLICE_STEP,", "index * (steps / slices) * SLICE_STEP,", "columns of an entry"),
    ("((step + 1) * groups - 1) / steps", "step * groups / steps", "tiles of a group"),
    ("return at < col_blocks ? at : col_blocks;", "return at;", "tiles of a group"),
    ("const bool is_job = step < groups;", "const bool is_job = step >= groups;", "wait for each other")])
def test_the_check_notices_what_it_is_there_to_notice(tmp_path, right, wrong, text):
    """Slices that leave columns out, tiles counted for another group than is waited for, a cut step counted as a whole one, tokens
    in front of their jobs."""
    include = tmp_path / "include"
    (include / HEADER).parent.mkdir(parents=True)
    for name in ("platform", "protocol"):
        (include / "tk_kernels" / name).symlink_to(REPO / "tk_kernels" / name)
    header = (REPO / HEADER).read_text()
    assert header.count(right) == 1
    changed = header.replace(right, wrong)
    if "is_job" in wrong:
        changed = changed.replace("is_job ? step : step - groups", "is_job ? step - groups : step")
    (include / HEADER).write_text(changed)
    done = outcome(include, tmp_path)
    assert done.returncode == 1 and text in done.stdout, done.stdout
