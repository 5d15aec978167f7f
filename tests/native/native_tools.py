"""Compilers for the native tests, and what to skip with when there is none."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from moe_tk.runtime.arch import parse_arch
from moe_tk.runtime.cuda_toolkit import choose_toolkit, find_toolkits, torch_cuda_version
from moe_tk.runtime.toolchain import find_host_compiler

REPO = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
DELAYS = ("-include", str(HERE / "random_delay.hpp"))
PROGRAMS = {
    # ThreadSanitizer does not know fences (-Wtsan); no host path depends on one
    "threads": ("-O1", "-g", "-fsanitize=thread", "-Wno-tsan", *DELAYS),
    "reorder": ("-O1", *DELAYS),
}
CUDA_FLAGS = ("-std=c++20", "-O3", "--expt-relaxed-constexpr", "-Werror=all-warnings", f"-I{REPO}")


def host_compiler() -> tuple[str, ...]:
    choice = find_host_compiler()
    if choice.chosen is None:
        pytest.skip(f"no C++20 compiler: {choice.reason}")
    return choice.chosen.command


def start_compile(program: str, folder: Path, root: Path = REPO) -> tuple[Path, subprocess.Popen]:
    """Starts to compile tests/native/<program>.cpp against the headers under `root`."""
    target = folder / program
    command = [*host_compiler(), "-std=c++20", "-Wall", "-Wextra", "-pthread", f"-I{root}", *PROGRAMS[program],
               str(HERE / f"{program}.cpp"), "-o", str(target)]
    return target, subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def nvcc(arch: str) -> list[str]:
    """nvcc with the flags for one architecture; skips, visibly, where no toolkit can build for it."""
    image = parse_arch(arch)
    choice = choose_toolkit(image, find_toolkits(), torch_cuda_version(), allow_mismatch=True)
    if choice.chosen is None:
        pytest.skip(f"no nvcc for sm_{arch}: {choice.reason}")
    return [str(choice.chosen.nvcc), f"-ccbin={host_compiler()[-1]}", *CUDA_FLAGS]


def run_checked(command: list[str]) -> str:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}"
    return done.stdout


def compile_ptx(source: str, arch: str, folder: Path) -> str:
    """PTX text of tests/native/<source> for sm_<arch>."""
    target = folder / f"{source}.{arch}.ptx"
    run_checked([*nvcc(arch), f"-arch=sm_{arch}", "-ptx", "-o", str(target), str(HERE / source)])
    return target.read_text()


def run_program(program: Path, *options: str, limit_s: float = 120) -> subprocess.CompletedProcess:
    """Runs a compiled test program; the options are key=value."""
    return subprocess.run([str(program), *options], capture_output=True, text=True, timeout=limit_s)
