"""Fixtures of the build tests: an empty cache, a tiny module, compilers and toolkits that are scripts."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from build_helpers import REPO, write_program

FOREIGN = ("CXX", "CUDA_HOME", "MAX_JOBS", "TORCH_CUDA_ARCH_LIST", "XDG_CACHE_HOME", "MOE_TK_BUILD_JOBS",
           "MOE_TK_BUILD_TIMEOUT_S", "MOE_TK_ALLOW_CUDA_MISMATCH", "MOE_TK_CACHE_DIR")

# Only Python.h, so that it compiles in a fraction of a second.
MINI = """\
#include <Python.h>
#include "value.h"
static PyModuleDef def = {PyModuleDef_HEAD_INIT, "mini", nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr};
extern "C" __attribute__((visibility("default"))) PyObject* PyInit_mini() {
    PyObject* module = PyModule_Create(&def);
    PyModule_AddIntConstant(module, "value", VALUE);
    return module;
}
"""


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch, tmp_path):
    """No variable of the person who runs the tests counts, and the cache is new."""
    for name in FOREIGN:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MOE_TK_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("PYTHONPATH", str(REPO))


@pytest.fixture
def cache(tmp_path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def mini_root(tmp_path) -> Path:
    """A source root with the module `mini` in mini.cpp; `mini.value` is 7, from a header."""
    root = tmp_path / "root"
    root.mkdir()
    (root / "mini.cpp").write_text(MINI)
    (root / "value.h").write_text("#define VALUE 7\n")
    return root


@pytest.fixture
def counting_cxx(tmp_path, monkeypatch) -> Callable[[], int]:
    """CXX is a script that notes each compilation and then runs the real compiler; returns how many there were."""
    real = shutil.which("g++") or shutil.which("clang++")
    assert real, "the tests need g++ or clang++"
    log = tmp_path / "compiled"
    log.touch()
    program = write_program(tmp_path / "bin" / "counting-g++", f"""#!/bin/sh
case " $* " in *" -c "*) echo x >>'{log}';; esac
exec {real} "$@"
""")
    monkeypatch.setenv("CXX", str(program))
    return lambda: len(log.read_text().splitlines())


@pytest.fixture
def copying_cxx(tmp_path, mini_root, monkeypatch) -> Callable[[], int]:
    """CXX is a script that notes each link and delivers a ready module slowly, in two pieces; returns the count."""
    from moe_tk.builder.build import build_host_module

    monkeypatch.setenv("MOE_TK_CACHE_DIR", str(tmp_path / "ready"))
    ready = build_host_module("mini", ["mini.cpp"], root=mini_root)
    monkeypatch.setenv("MOE_TK_CACHE_DIR", str(tmp_path / "cache"))
    log = tmp_path / "linked"
    log.touch()
    program = write_program(tmp_path / "bin" / "copying-g++", f"""#!/bin/sh
for out; do :; done
case " $* " in
*" --version "*) echo "g++ (fake) 12.2.0";;
*" -dumpmachine "*) echo fake-linux;;
*" -c "*) : >"$out";;
*) echo x >>'{log}'; head -c 1000 '{ready}' >"$out"; sleep 0.02; tail -c +1001 '{ready}' >>"$out";;
esac
""")
    monkeypatch.setenv("CXX", str(program))
    return lambda: len(log.read_text().splitlines())


@pytest.fixture
def fake_toolkit(tmp_path) -> Callable[..., Path]:
    """Make a CUDA toolkit folder whose nvcc is a script: fake_toolkit("cuda-13.0", "13.0", header=13000)."""

    def make(name: str, version: str, *, header: int | None = None, nvcc_only: bool = False) -> Path:
        root = tmp_path / name
        write_program(root / "bin" / "nvcc", f"""#!/bin/sh
echo "nvcc: NVIDIA (R) Cuda compiler driver"
echo "Cuda compilation tools, release {version}, V{version}.1"
""")
        if nvcc_only:
            return root
        for tool in ("bin/ptxas", "bin/cudafe++", "bin/fatbinary", "nvvm/bin/cicc"):
            write_program(root / tool, "#!/bin/sh\n")
        major, minor = version.split(".")
        number = header if header is not None else int(major) * 1000 + int(minor) * 10
        (root / "include").mkdir()
        (root / "include" / "cuda.h").write_text(f"#define CUDA_VERSION {number}\n")
        (root / "include" / "cuda_runtime.h").write_text("\n")
        return root

    return make
