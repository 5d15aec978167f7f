"""Every instantiation compiles for SM90 without spills and without serialised wgmma; the rest for SM100 and SM120 too."""

from __future__ import annotations

import functools
import re
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pybind11
import pytest

from moe_tk.runtime.cuda_toolkit import find_toolkits

REPO = Path(__file__).resolve().parents[2]
FLAGS = ("-std=c++20", "-O3", "--expt-relaxed-constexpr", "-Xcompiler=-fPIC", "-Xptxas=-v")
UNIT = "tests/thunderkittens/unit_module.cu"


@pytest.fixture(scope="module")
def nvcc() -> str:
    usable = [t for t in find_toolkits() if t.version and not t.problem and t.version >= (12, 8)]
    if not usable:
        pytest.skip("needs a CUDA toolkit 12.8 or newer")
    return str(usable[0].nvcc)


def compile_log(nvcc: str, source: str, arch: str, out: Path, *more: str) -> str:
    include = (f"-I{REPO}", f"-isystem={pybind11.get_include()}", f"-isystem={sysconfig.get_paths()['include']}")
    target = f"-gencode=arch=compute_{arch},code=sm_{arch}"
    command = [nvcc, *FLAGS, *more, target, *include, "-c", str(REPO / source), "-o", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.parametrize("source,kernels", [("grouped_gemm.cu", 14), ("grouped_gemm_fp8.cu", 10), ("build_tasks.cu", 1)])
def test_no_spill_and_no_serialised_wgmma(nvcc, tmp_path, source, kernels):
    log = compile_log(nvcc, f"tk_kernels/patterns/{source}", "90a", tmp_path / "a.o")
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log)
    assert len(spills) == kernels, f"{len(spills)} instantiations, the list of tiles says {kernels}"
    assert set(spills) == {("0", "0")}, log
    assert not re.search(r"C75\d\d|serializ|setmaxnreg.*ignored", log), log


@pytest.mark.parametrize("arch", ["90a", "100a", "120a"])
def test_tile_library_compiles(nvcc, tmp_path, arch):
    more = ("-DKITTENS_TEST_WGMMA",) if arch == "90a" else ()
    log = compile_log(nvcc, UNIT, arch, tmp_path / "a.o", *more)
    assert not re.search(r"[1-9]\d* bytes spill", log), log


@pytest.mark.parametrize("arch", ["100a", "120a"])
def test_task_builder_compiles_elsewhere(nvcc, tmp_path, arch):
    """The part of the engine without wgmma."""
    compile_log(nvcc, "tk_kernels/patterns/build_tasks.cu", arch, tmp_path / "a.o")


def test_no_op_hooks_leave_no_trace(nvcc, tmp_path):
    """The same machine code as an engine whose hook calls are cut out of the source."""
    for folder in ("tk_kernels", "thunderkittens"):
        shutil.copytree(REPO / folder, tmp_path / "cut" / folder)
    engine = tmp_path / "cut" / "tk_kernels/engine/grouped_gemm.cuh"
    text = engine.read_text()
    for hook in (r"\n *Gate::wait\(g\.gate, w\.task\);", r"\n        if constexpr \(!Push::NOOP\) \{.*?\n        \}(?=\n)"):
        text, cuts = re.subn(hook, "", text, flags=re.DOTALL)
        assert cuts == 1, f"the engine calls no hook like {hook}"
    engine.write_text(text)
    plain, cut = (machine_code(nvcc, root, tmp_path / f"{root.name}.cubin") for root in (REPO, tmp_path / "cut"))
    assert len(plain) > 300 and plain == cut


def machine_code(nvcc: str, root: Path, cubin: Path) -> list[str]:
    """Instructions and register counts of the plain 128 x 256 kernel."""
    source = cubin.with_suffix(".cu")
    source.write_text(f"""#include "{root}/tk_kernels/engine/grouped_gemm.cuh"
#include "{root}/tk_kernels/hooks/epilogue.cuh"
#include "{root}/tk_kernels/hooks/noop.cuh"
using config = moe_tk::gemm_config<kittens::bf16, 128, 256, 4, 2, 1, 2, 2>;
template __global__ void moe_tk::grouped_gemm<config, moe_tk::no_gate, moe_tk::plain_epilogue, moe_tk::no_push>(
    const __grid_constant__ moe_tk::gemm_globals<config, moe_tk::no_gate, moe_tk::plain_epilogue, moe_tk::no_push>);
""")
    run = functools.partial(subprocess.run, check=True, capture_output=True, text=True)
    run([nvcc, *FLAGS[:3], "-gencode=arch=compute_90a,code=sm_90a", "-cubin", "-o", cubin, source])
    listing = run([Path(nvcc).with_name("cuobjdump"), "-sass", "-res-usage", cubin]).stdout
    return ["".join(found) for found in re.findall(r"/\*[0-9a-f]{4,}\*/ +([A-Z@].*?;)|(REG:\d+)", listing)]
