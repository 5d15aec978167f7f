"""The same with a real nvcc, where this machine has one that can build for SM90. No GPU is needed."""

from __future__ import annotations

import pytest

from moe_tk.builder.arch import parse_arch
from moe_tk.builder.build import build_cuda_module, load_module
from moe_tk.builder.cuda_toolkit import choose_toolkit, find_toolkits, torch_cuda_version
from moe_tk.errors import BuildError

WGMMA = '__global__ void f() { asm volatile("wgmma.fence.sync.aligned;"); }\n'
KERNEL = """
#include <cuda_runtime.h>
#if defined(__CUDA_ARCH__) && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
#error "not compiled for 90a"
#endif
__global__ void fill(int* out, int value) { *out = value; }
cudaError_t launch(int* out) { fill<<<1, 1>>>(out, 1); return cudaGetLastError(); }
"""


@pytest.fixture
def real_toolkit():
    choice = choose_toolkit(parse_arch("90a"), find_toolkits(), torch_cuda_version())
    if choice.chosen is None:
        pytest.skip(choice.reason)
    return choice.chosen


def test_real_nvcc_builds_a_module_that_loads_without_a_gpu(real_toolkit, mini_root):
    (mini_root / "kernel.cu").write_text(KERNEL)
    path = build_cuda_module("mini", ["mini.cpp", "kernel.cu"], arch="9.0", root=mini_root)
    assert load_module(path, "mini").value == 7
    assert real_toolkit.problem is None and all(real_toolkit.files.values())


def test_bld_14_real_nvcc_missing_header(real_toolkit, mini_root):
    (mini_root / "kernel.cu").write_text('#include "tile_that_is_not_there.cuh"\n')
    with pytest.raises(BuildError, match=r"(?s)-gencode=.*tile_that_is_not_there.*hint: a header is missing"):
        build_cuda_module("mini", ["kernel.cu"], arch="90a", root=mini_root)


def test_bld_08_real_nvcc_without_the_letter_is_hinted_at(real_toolkit, mini_root):
    (mini_root / "kernel.cu").write_text(KERNEL + WGMMA)
    build_cuda_module("mini", ["mini.cpp", "kernel.cu"], arch="90", root=mini_root)  # made 90a
    plain = KERNEL.replace("!defined(__CUDA_ARCH_FEAT_SM90_ALL)", "0")
    (mini_root / "kernel.cu").write_text(plain + WGMMA)
    with pytest.raises(BuildError, match="needs the architecture-specific name"):
        build_cuda_module("mini", ["kernel.cu"], arch="90a", root=mini_root,
                          extra_flags=["-gencode=arch=compute_90,code=sm_90"])
