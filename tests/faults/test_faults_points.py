"""The fault points: in the module that asks for them, and nowhere else."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from fault_lab import STRUCK, Board, arm, checked_call, inputs, make_layer, run_ranks, values
from fault_scenarios import FAULT_PHASES

from moe_tk.builder import toolchain
from moe_tk.builder.native_root import native_root
from moe_tk.runtime.host import FAULT_POINT_FLAGS, SOURCES

POINT = re.compile(r"^.*(MOE_TK_FAULT_POINT\(.*\)|fault_points\.hpp\").*\n", re.MULTILINE)


def preprocessed(root: Path, *flags: str) -> str:
    """The host module's translation unit as the compiler proper sees it, without what comes from outside this project."""
    compiler = toolchain.find_host_compiler().require().command
    include = [f"-I{root}", f"-I{toolchain.find_pybind11().require()}", f"-I{toolchain.find_python_headers().require()}"]
    text = subprocess.run([*compiler, "-std=c++20", "-E", *include, *flags, str(root / SOURCES[0])], check=True,
                          capture_output=True, text=True).stdout
    lines, ours = [], False
    for line in text.splitlines():
        if line.startswith("# "):
            ours = f"{root}/tk_kernels/" in line  # a virtual environment may lie below root too
        elif ours and line.strip():
            lines.append(line.strip())
    return "\n".join(lines)


def test_the_normal_build_is_the_one_without_any_point(tmp_path):
    """The same tokens reach the compiler as from a copy of the tree from which every trace of the points was cut."""
    root = native_root()
    shutil.copytree(root / "tk_kernels", tmp_path / "tk_kernels")
    cut = 0
    for path in [*tmp_path.rglob("*.hpp"), *tmp_path.rglob("*.cpp")]:
        text = path.read_text()
        if path.name == "fault_points.hpp":
            path.unlink()
        elif POINT.search(text):
            path.write_text(POINT.sub("", text))
            cut += 1
    assert cut >= 4
    normal = preprocessed(root)
    assert len(normal) > 20_000
    assert normal == preprocessed(tmp_path)
    assert "fault_points" not in normal and "arm_fault" not in normal and "kill(" not in normal
    variant = preprocessed(root, *FAULT_POINT_FLAGS)
    assert variant.count("fault_points::reached(") >= 4 and "arm_fault" in variant


def pass_every_phase(rank: int, world: int, board_path: str, pattern: str, mode: str) -> list[str]:
    board, wrong = Board(board_path, world), []
    layer = make_layer(pattern=pattern, mode=mode)
    missing = []
    for call, phase in enumerate(FAULT_PHASES):
        board.clear(rank, STRUCK)
        arm("delay", phase, 2, seconds=0.001, stamp=board.address(rank, STRUCK))
        checked_call(layer, inputs(rank, call), wrong)
        if not board.at(rank, STRUCK):
            missing.append(f"{phase} has fewer than two points in a call")
    return missing + wrong


@pytest.mark.parametrize(("pattern", "mode"), [("mega", "ep"), ("two_kernel", "tp")])
def test_every_phase_of_a_call_has_points(tmp_path, pattern, mode):
    assert values(run_ranks(2, pass_every_phase, pattern, mode, folder=tmp_path)) == [[], []]
