"""Builds every native module that tests and benchmarks on GPUs use, several side by side, so that none waits for a compiler.

    python -m tests.build_modules    needs nvcc and no GPU; what is in the cache already takes a second

A cache folder has one builder at a time, which is right for ranks that all want the same module. Here each module is built in a
cache of its own and then moved into the real one.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

from moe_tk.builder.build import build_cuda_module, build_host_module
from moe_tk.builder.cache import make_cache_folder
from moe_tk.builder.jobs import usable_cores
from moe_tk.builder.native_root import native_modules
from moe_tk.errors import BuildError

ARCH = "90a"
CORES_OF_A_BUILD = 6  # about as many sources does a module have
REPO = Path(__file__).resolve().parents[1]


def kittens_unit() -> Path:
    """The operations of the tile library one by one, for tests/thunderkittens."""
    return build_cuda_module("kittens_unit", ["tests/thunderkittens/unit_module.cu"], arch=ARCH, root=REPO,
                             extra_flags=("-DKITTENS_TEST_WGMMA",))


def traced() -> Path:
    """The second build of the layer, whose kernels record what they do."""
    from moe_tk.runtime.nvlink import nvlink_module

    return Path(nvlink_module(traced=True).__file__)


def native(name: str) -> Path:
    """A module of the package."""
    module = next(module for module in native_modules() if module.name == name)
    if module.kind == "host":
        return build_host_module(name, module.sources)
    return build_cuda_module(name, module.sources, arch=ARCH)


def aside(build: Callable[..., Path], *arguments: str) -> tuple[str, float]:
    """(file name in the cache, seconds) of a module that is built in a cache of its own, unless the real one has it."""
    begin, cache, before = time.monotonic(), make_cache_folder(), os.environ.get("MOE_TK_CACHE_DIR")
    with tempfile.TemporaryDirectory(prefix="aside-", dir=cache) as folder:
        for built in cache.glob("*.so"):
            os.link(built, Path(folder, built.name))
        os.environ["MOE_TK_CACHE_DIR"] = folder
        try:
            made = build(*arguments)
        finally:
            os.environ.pop("MOE_TK_CACHE_DIR")
            if before is not None:
                os.environ["MOE_TK_CACHE_DIR"] = before
        for suffix in (".log", ".json", ".so"):  # the module last: what is beside it is there when it is
            if (file := made.with_suffix(suffix)).exists():
                os.replace(file, cache / file.name)
    return made.name, time.monotonic() - begin


def main() -> int:
    jobs = [(traced,), (kittens_unit,), *((native, module.name) for module in native_modules())]
    failed = 0
    with ProcessPoolExecutor(max(1, usable_cores() // CORES_OF_A_BUILD), mp_context=multiprocessing.get_context("spawn")) as pool:
        for future in as_completed([pool.submit(aside, *job) for job in jobs]):
            try:
                name, seconds = future.result()
                print(f"{name} after {seconds:.1f} s", flush=True)
            except BuildError as error:
                failed += 1
                print(f"FAILED: {error}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
