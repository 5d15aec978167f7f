"""The traced build of the NVLink module compiles for SM90, and the plain one has no trace of it."""

from __future__ import annotations

import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from moe_tk.builder.arch import parse_arch
from moe_tk.builder.cuda_toolkit import choose_toolkit, find_toolkits, torch_cuda_version
from moe_tk.runtime.stamps import KERNELS, WRITERS, stamp_sizes
from moe_tk.trace.kinds import GPU_KINDS

REPO = Path(__file__).resolve().parents[2]
SOURCES = ("tk_kernels/nvlink/open_call.cu", "tk_kernels/nvlink/fused_gemm.cu")
CALLS = re.compile(r"^ *(?:if \(leader\) |if constexpr \(!Gate::NOOP\) |return )?stamps?_\w+\(.*\);\n", re.MULTILINE)


def nvcc() -> Path | None:
    chosen = choose_toolkit(parse_arch("90a"), find_toolkits(), torch_cuda_version()).chosen
    return Path(chosen.nvcc) if chosen else None


needs_nvcc = pytest.mark.skipif(nvcc() is None, reason="no nvcc that can build for SM90")


@needs_nvcc
def test_traced_module_is_built_beside_the_plain_one_and_its_numbers_are_ours():
    from moe_tk.runtime.nvlink import nvlink_module

    traced, plain = nvlink_module(traced=True), nvlink_module()
    assert traced is not plain and traced.__file__ != plain.__file__ and traced.variants() == plain.variants()
    assert stamp_sizes(traced) == (KERNELS, WRITERS, len(GPU_KINDS))
    assert hasattr(traced, "clock_sync") and not hasattr(plain, "clock_sync") and not hasattr(plain, "STAMP_KINDS")


@needs_nvcc
def test_without_the_macro_stamps_leave_no_trace_in_the_machine_code(tmp_path):
    """A copy of the sources in which nobody calls a stamp gives the same machine code and registers."""
    calls = 0
    for folder in ("tk_kernels", "thunderkittens"):
        shutil.copytree(REPO / folder, tmp_path / folder)
    for path in (tmp_path / "tk_kernels").rglob("*.cuh"):
        if path.name != "stamps.cuh":
            text, cuts = CALLS.subn(lambda found: "return;\n" if "return " in found[0] else "", path.read_text())
            path.write_text(text)
            calls += cuts
    assert calls >= 30 and not left_over(tmp_path)
    jobs = [(root, source, tmp_path / f"{index}.cubin") for index, (root, source) in
            enumerate((root, source) for source in SOURCES for root in (REPO, tmp_path))]
    with ThreadPoolExecutor(2) as pool:
        codes = list(pool.map(lambda job: machine_code(*job), jobs))
    for source, with_calls, without in zip(SOURCES, codes[::2], codes[1::2], strict=True):
        assert len(with_calls) > 1000 and with_calls == without, source


def left_over(root: Path) -> list[str]:
    """Lines that still call a stamp."""
    return [line for path in (root / "tk_kernels").rglob("*.cuh") if path.name != "stamps.cuh"
            for line in path.read_text().splitlines() if re.search(r"\bstamps?_(lap|arrival|moment|begin|restart|off)", line)]


def machine_code(root: Path, source: str, cubin: Path) -> list[str]:
    compiler = nvcc()
    command = [compiler, "-std=c++20", "-O3", "--expt-relaxed-constexpr", "--expt-extended-lambda", "-arch=sm_90a", "-cubin", "-o",
               cubin, source]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    listing = subprocess.run([compiler.with_name("cuobjdump"), "-sass", "-res-usage", cubin], check=True, capture_output=True,
                             text=True).stdout
    return ["".join(found) for found in re.findall(r"/\*[0-9a-f]{4,}\*/ +([A-Z@].*?;)|(REG:\d+)", listing)]
