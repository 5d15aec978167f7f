"""`import moe_tk` and the command line load next to nothing and need nothing (BLD-07, DOC-22)."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest
from packaging_helpers import REPO

HEAVY = ("torch", "numpy", "pybind11", "ninja", "rich", "pynvml", "safetensors", "subprocess", "hashlib")


def python(*args: str, **environment: str) -> subprocess.CompletedProcess:
    """A new interpreter that sees this checkout, an empty PATH and no GPU variables."""
    foreign = ("CUDA", "MOE_TK", "PYTHON", "CXX")
    env = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    env |= {"PATH": "", "PYTHONPATH": str(REPO), "PYTHONDONTWRITEBYTECODE": "1", **environment}
    return subprocess.run([sys.executable, *args], env=env, capture_output=True, text=True, timeout=120, cwd="/",
                          stdin=subprocess.DEVNULL)


def loaded_by(code: str) -> list[str]:
    done = python("-c", f"import sys; before = set(sys.modules); {code}; "
                        "print(*sorted(name for name in set(sys.modules) - before))")
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_import_loads_no_heavy_module():
    loaded = loaded_by("import moe_tk")
    assert not [name for name in loaded if name.partition(".")[0] in HEAVY]
    assert [name for name in loaded if name.startswith("moe_tk")] == ["moe_tk", "moe_tk.errors"]


def test_builder_and_command_line_load_no_torch():
    loaded = loaded_by("import moe_tk.builder.build, moe_tk.cli.main, moe_tk.cli.build")
    assert not [name for name in loaded if name.partition(".")[0] in ("torch", "numpy", "rich", "pynvml")]


def test_import_is_fast():
    """Fastest of five, so that a busy machine does not fail it: the cost over an interpreter that imports nothing."""

    def fastest(code: str) -> float:
        times = []
        for _ in range(5):
            start = time.monotonic()
            assert python("-c", code).returncode == 0
            times.append(time.monotonic() - start)
        return min(times)

    assert fastest("import moe_tk") - fastest("pass") < 0.3


@pytest.mark.parametrize("category", ["FutureWarning", "DeprecationWarning", "ImportWarning"])
def test_doc_22_import_gives_no_warning(category):
    code = "import moe_tk, moe_tk.builder.build, moe_tk.cli.build, moe_tk.cli.main"
    done = python("-W", f"error::{category}", "-c", code)
    assert (done.returncode, done.stderr) == (0, "")


def test_doc_22_looking_for_gpus_gives_no_warning():
    done = python("-W", "error::FutureWarning", "-c", "from moe_tk.cli.build import _capabilities; _capabilities()")
    assert (done.returncode, done.stderr) == (0, "")


def test_bld_07_import_and_help_need_no_compiler_toolkit_or_driver():
    done = python("-c", "import moe_tk; print(moe_tk.__version__)")
    assert done.returncode == 0 and done.stderr == ""
    for words in (["--help"], ["build", "--help"], ["--version"]):
        done = python("-m", "moe_tk", *words)
        assert done.returncode == 0 and done.stderr == "" and done.stdout


def test_bld_07_building_without_a_compiler_is_one_clear_message(tmp_path):
    done = python("-m", "moe_tk", "build", "--host", MOE_TK_CACHE_DIR=str(tmp_path / "cache"))
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert done.stderr.startswith("moe_tk: BuildError: no usable C++20 compiler: neither g++, clang++ nor c++ is on ")
    assert not (tmp_path / "cache").exists()
