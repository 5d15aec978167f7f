"""Compilers for the native tests, and what to skip with when there is none."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from native_programs import HERE, REPO, compile_command

from moe_tk.builder.arch import parse_arch
from moe_tk.builder.cuda_toolkit import choose_toolkit, find_toolkits, torch_cuda_version
from moe_tk.builder.toolchain import find_host_compiler

CUDA_FLAGS = ("-std=c++20", "-O3", "--expt-relaxed-constexpr", "-Werror=all-warnings", f"-I{REPO}")


def host_compiler() -> tuple[str, ...]:
    choice = find_host_compiler()
    if choice.chosen is None:
        pytest.skip(f"no C++20 compiler: {choice.reason}")
    return choice.chosen.command


def start_compile(program: str, folder: Path) -> tuple[Path, subprocess.Popen]:
    """Starts to compile a native test program."""
    target = folder / program
    command = compile_command(host_compiler(), program, target)
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
