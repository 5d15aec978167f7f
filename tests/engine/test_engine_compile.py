"""Every instantiation compiles for SM90 without spills and without serialised wgmma; the rest for SM100 and SM120 too.

Device code alone, all compilations side by side: about a minute on two cores.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sysconfig
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pybind11
import pytest

from moe_tk.builder.cuda_toolkit import find_toolkits

REPO = Path(__file__).resolve().parents[2]
UNIT = "tests/thunderkittens/unit_module.cu"
PATTERNS = {"grouped_gemm.cu": 14, "grouped_gemm_fp8.cu": 10, "build_tasks.cu": 1}  # and how many kernels each has
PLAIN = """#include "tk_kernels/engine/grouped_gemm.cuh"
#include "tk_kernels/hooks/epilogue.cuh"
#include "tk_kernels/hooks/noop.cuh"
using config = moe_tk::gemm_config<kittens::bf16, 128, 256, 4, 2, 1, 2, 2>;
template __global__ void moe_tk::grouped_gemm<config, moe_tk::no_gate, moe_tk::plain_epilogue, moe_tk::no_push>(
    const __grid_constant__ moe_tk::gemm_globals<config, moe_tk::no_gate, moe_tk::plain_epilogue, moe_tk::no_push>);
"""
HOOK_CALLS = (r"\n *Gate::wait\(g\.gate, w\.task\);", r"\n        if constexpr \(!Push::NOOP\) \{.*?\n        \}(?=\n)")


def nvcc() -> Path | None:
    usable = [t.nvcc for t in find_toolkits() if t.version and not t.problem and t.version >= (12, 8)]
    return Path(usable[0]) if usable else None


@pytest.fixture(scope="module")
def cubins(tmp_path_factory):
    """(source, arch) -> future of (cubin, compiler's log), of all compilations of this file."""
    compiler = nvcc()
    if compiler is None:
        pytest.skip("needs a CUDA toolkit 12.8 or newer")
    folder = tmp_path_factory.mktemp("cubins")
    plain, cut = folder / "plain.cu", folder / "cut" / "plain.cu"
    plain.write_text(PLAIN)
    cut_hook_calls(cut.parent)
    cut.write_text(PLAIN)
    jobs = [(UNIT, arch, REPO) for arch in ("90a", "120a", "100a")]
    jobs += [(f"tk_kernels/patterns/{name}", "90a", REPO) for name in PATTERNS]
    jobs += [("tk_kernels/patterns/build_tasks.cu", arch, REPO) for arch in ("100a", "120a")]
    jobs += [(str(plain), "90a", REPO), (str(cut), "90a", cut.parent)]
    pool = ThreadPoolExecutor(min(4, os.cpu_count() or 1))
    yield {"cut": str(cut), "plain": str(plain)}, {
        (source, arch): pool.submit(compile_cubin, compiler, source, arch, root, folder / f"{index}.cubin")
        for index, (source, arch, root) in enumerate(jobs)}
    pool.shutdown(cancel_futures=True)


def compile_cubin(compiler: Path, source: str, arch: str, root: Path, cubin: Path) -> tuple[Path, str]:
    include = (f"-I{root}", f"-isystem={pybind11.get_include()}", f"-isystem={sysconfig.get_paths()['include']}")
    command = [compiler, "-std=c++20", "-O3", "--expt-relaxed-constexpr", "-Xptxas=-v", f"-arch=sm_{arch}", "-cubin", "-o", cubin,
               *include, root / source]
    if source == UNIT and arch == "90a":
        command.append("-DKITTENS_TEST_WGMMA")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return cubin, done.stdout + done.stderr


def cut_hook_calls(root: Path) -> None:
    """A copy of the sources below `root` in which the engine calls neither gate nor push."""
    for folder in ("tk_kernels", "thunderkittens"):
        shutil.copytree(REPO / folder, root / folder)
    cuts = dict.fromkeys(HOOK_CALLS, 0)
    for engine in (root / "tk_kernels/engine/load_tasks.cuh", root / "tk_kernels/engine/grouped_gemm.cuh"):
        text = engine.read_text()
        for call in HOOK_CALLS:
            text, found = re.subn(call, "", text, flags=re.DOTALL)
            cuts[call] += found
        engine.write_text(text)
    assert set(cuts.values()) == {1}, f"calls of hooks in the engine: {cuts}"


def log_of(cubins, source: str, arch: str) -> str:
    future: Future = cubins[1][source, arch]
    return future.result()[1]


@pytest.mark.parametrize("source", PATTERNS)
def test_no_spill_and_no_serialised_wgmma(cubins, source):
    log = log_of(cubins, f"tk_kernels/patterns/{source}", "90a")
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log)
    assert len(spills) == PATTERNS[source], f"{len(spills)} instantiations, the list of tiles says {PATTERNS[source]}"
    assert set(spills) == {("0", "0")}, log
    assert not re.search(r"C75\d\d|serializ|setmaxnreg.*ignored", log), log


@pytest.mark.parametrize("arch", ["90a", "100a", "120a"])
def test_tile_library_compiles(cubins, arch):
    """All operations; those of wgmma for SM90 alone."""
    log = log_of(cubins, UNIT, arch)
    assert "spill" in log and not re.search(r"[1-9]\d* bytes spill", log), log


@pytest.mark.parametrize("arch", ["100a", "120a"])
def test_task_builder_compiles_elsewhere(cubins, arch):
    """The part of the engine without wgmma."""
    log_of(cubins, "tk_kernels/patterns/build_tasks.cu", arch)


def test_no_op_hooks_leave_no_trace(cubins):
    """The machine code and registers of a copy of the source whose engine calls no hook."""
    plain, cut = (machine_code(cubins[1][cubins[0][name], "90a"].result()[0]) for name in ("plain", "cut"))
    assert len(plain) > 300 and any(line.startswith("REG:") for line in plain)
    assert plain == cut


def machine_code(cubin: Path) -> list[str]:
    tool = nvcc().with_name("cuobjdump")
    listing = subprocess.run([tool, "-sass", "-res-usage", cubin], check=True, capture_output=True, text=True).stdout
    return ["".join(found) for found in re.findall(r"/\*[0-9a-f]{4,}\*/ +([A-Z@].*?;)|(REG:\d+)", listing)]
