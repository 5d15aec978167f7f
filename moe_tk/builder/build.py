"""The builder: C++ and CUDA sources -> a loadable module in the cache, made once per version and machine.

A module's file name holds two hashes. The first covers the sources, flags, architecture, Python ABI, pybind11 and
(for host code) the CPU; the second the compiler. With a compiler at hand both must match; without one the first is
enough, so that a machine without any toolchain can use what was built ahead.
"""

from __future__ import annotations

import hashlib
import importlib.machinery
import importlib.util
import json
import os
import shutil
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from moe_tk.builder import cuda_toolkit, toolchain
from moe_tk.builder.arch import parse_arch
from moe_tk.builder.cache import BuildLock, find_built, make_cache_folder, make_work_folder, publish
from moe_tk.builder.hints import hint_for
from moe_tk.builder.jobs import BUDGET_BYTES, count_jobs, free_memory, usable_cores
from moe_tk.builder.native_root import hash_sources, native_root
from moe_tk.builder.progress import BuildProgress
from moe_tk.builder.steps import Step, StepFailure, run_steps
from moe_tk.config import env
from moe_tk.errors import BuildError

__all__ = ["build_cuda_module", "build_host_module", "host_flags", "load_module", "native_root"]

_HOST_FLAGS = ("-std=c++20", "-O3", "-fPIC", "-pthread", "-fvisibility=hidden")
_HOST_LIBRARIES = ("-lrt",)  # shm_open lives there before glibc 2.34
_CUDA_FLAGS = ("-std=c++20", "-O3", "--expt-relaxed-constexpr", "--expt-extended-lambda", "-lineinfo",
               "-Xcompiler=-fPIC,-fvisibility=hidden,-pthread")
_LOADED: dict[tuple[str, str], ModuleType] = {}


@dataclass(frozen=True, slots=True)
class _Request:
    """One module to make. `steps` gets the folder with Python.h and the one with pybind11."""

    name: str
    target: str                # "host" or "sm_90a": part of the file name
    kind: str                  # "host" or "cuda"
    source_key: str
    tool_key: str | None       # None: no compiler here
    tool: str                  # for people
    require_tool: Callable[[], object]
    steps: Callable[[Path, Path], list[Step]]

    @property
    def pattern(self) -> str:
        return f"{self.name}.{self.target}.{self.source_key}.{self.tool_key or '*'}.so"


def build_host_module(name: str, sources: Sequence[str], *, root: Path | str | None = None,
                      extra_flags: Sequence[str] = ()) -> Path:
    """Path of the built C++ module `name` (the name in PYBIND11_MODULE); compiled only if the cache has no such one.

    sources: relative to `root` (default: native_root()), which is also on the include path. extra_flags go to the
    compiler and the linker, after ours. Raises BuildError.
    """
    base, files = _checked_sources(name, sources, root)
    choice = toolchain.find_host_compiler()
    flags = (*host_flags(choice.chosen), *extra_flags)
    source_key = _key(hash_sources(base, files), *flags, *sources, toolchain.cpu_identity(), *_abi())
    tool_key = choice.chosen and _key(*choice.chosen.command, choice.chosen.identity, toolchain.compiler_variables())

    def steps(python: Path, pybind11: Path) -> list[Step]:
        compiler = choice.require().command
        include = (f"-I{base}", f"-I{pybind11}", f"-I{python}", f"-ffile-prefix-map={base}=.")
        compiled = [
            Step(f"{index}.o", (str(file),), (*compiler, *flags, *include, "-c", str(file), "-o", f"{index}.o"))
            for index, file in enumerate(files)
        ]
        objects = tuple(step.output for step in compiled)
        link = (*compiler, "-shared", *_HOST_FLAGS, *objects, *extra_flags, *_HOST_LIBRARIES, "-o", "module.so")
        return [*compiled, Step("module.so", objects, link)]

    tool = choice.chosen.short_label if choice.chosen else "no compiler"
    return _build(_Request(name, "host", "host", source_key, tool_key, tool, choice.require, steps))


def build_cuda_module(name: str, sources: Sequence[str], *, arch: str, root: Path | str | None = None,
                      extra_flags: Sequence[str] = ()) -> Path:
    """Path of the built CUDA module `name` for one architecture ("90a", "9.0", "sm_90a"); needs no GPU.

    Sources ending in .cpp go to nvcc as well. The CUDA runtime is linked in statically, so loading needs nothing of the
    toolkit. extra_flags are nvcc flags for compiling and linking. Raises BuildError, also when no toolkit fits.
    """
    base, files = _checked_sources(name, sources, root)
    image = parse_arch(arch)
    host = toolchain.find_host_compiler()
    choice = cuda_toolkit.choose_toolkit(image, cuda_toolkit.find_toolkits(), cuda_toolkit.torch_cuda_version(),
                                         allow_mismatch=env("MOE_TK_ALLOW_CUDA_MISMATCH"))
    flags = (*_CUDA_FLAGS, *image.nvcc_flags, *extra_flags)
    source_key = _key(hash_sources(base, files), *flags, *sources, *_abi())
    toolkit = choice.chosen
    tool_key = None
    if toolkit and host.chosen:
        tool_key = _key(str(toolkit.nvcc), toolkit.identity, *host.chosen.command, host.chosen.identity,
                        toolchain.compiler_variables())

    def require_tool() -> None:
        choice.require()
        host.require()
        for text in choice.warnings:
            warnings.warn(text, RuntimeWarning, stacklevel=2)

    def steps(python: Path, pybind11: Path) -> list[Step]:
        # nvcc takes a program for -ccbin, not a command with arguments: only the last word of "ccache g++"
        nvcc = (str(choice.require().nvcc), f"-ccbin={host.require().command[-1]}")
        include = (f"-I{base}", f"-isystem={pybind11}", f"-isystem={python}")
        compiled = [
            Step(f"{index}.o", (str(file),), (*nvcc, *flags, *include, "-x=cu", "-c", str(file), "-o", f"{index}.o"))
            for index, file in enumerate(files)
        ]
        objects = tuple(step.output for step in compiled)
        link = (*nvcc, "-shared", "-cudart=static", *flags, *objects, "-o", "module.so")
        return [*compiled, Step("module.so", objects, link)]

    tool = f"nvcc {cuda_toolkit.dotted(toolkit.version)}" if toolkit and toolkit.version else "no nvcc"
    return _build(_Request(name, f"sm_{image.name}", "cuda", source_key, tool_key, tool, require_tool, steps))


def host_flags(compiler: toolchain.CompilerCandidate | None) -> tuple[str, ...]:
    """The flags that every host source is compiled with, without include folders."""
    return (*_HOST_FLAGS, *toolchain.native_tuning(compiler))


def load_module(path: Path | str, name: str) -> ModuleType:
    """Import the extension module `name` from exactly this file. The same file is loaded once per process.

    Raises BuildError when the file does not load, with the loader's reason and what to do.
    """
    key = (os.path.realpath(path), name)
    if key not in _LOADED:
        loader = importlib.machinery.ExtensionFileLoader(name, str(path))
        spec = importlib.util.spec_from_file_location(name, str(path), loader=loader)
        assert spec is not None
        try:
            module = importlib.util.module_from_spec(spec)
            loader.exec_module(module)
        except ImportError as error:
            raise BuildError(f"the built module {path} does not load: {error}. If it is damaged, delete it and it is "
                             "built again; if a symbol is undefined, a source file is missing from it.") from error
        _LOADED[key] = module
    return _LOADED[key]


def _checked_sources(name: str, sources: Sequence[str], root: Path | str | None) -> tuple[Path, list[Path]]:
    if not name.isidentifier():
        raise BuildError(f"module name {name!r} is not a Python identifier, so nothing could import it")
    base = (Path(root) if root is not None else native_root()).resolve()
    files = [(base / source).resolve() for source in sources]
    missing = [str(file) for file in files if not file.is_file()]
    if missing or not files:
        raise BuildError(f"{name}: source files missing under {base}: {', '.join(missing) or 'none was named'}. "
                         "The install is incomplete, reinstall moe-tk.")
    return base, files


def _abi() -> tuple[str, str]:
    return toolchain.python_abi(), toolchain.pybind11_version()


def _key(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]


def _build(request: _Request) -> Path:
    built = find_built(request.pattern)
    if built is not None:
        return built
    request.require_tool()
    ninja = toolchain.find_ninja().require()
    steps = request.steps(toolchain.find_python_headers().require(), toolchain.find_pybind11().require())
    folder = make_cache_folder()
    final = folder / request.pattern
    lock = BuildLock(folder, request.name)
    if not lock.acquire(final.exists, env("MOE_TK_BUILD_TIMEOUT_S")):
        return final
    work = None
    try:
        work = make_work_folder(folder, lock)
        _compile(request, ninja, steps, work, final)
    except OSError as error:
        raise BuildError(f"building {request.name} in {folder} failed: {error.strerror} ({error.filename or folder}). "
                         f"hint: {hint_for(error.strerror or '', None) or 'check that folder'}") from error
    finally:
        if work is not None:
            shutil.rmtree(work, ignore_errors=True)
        lock.release()
    return final


def _compile(request: _Request, ninja: Path, steps: list[Step], work: Path, final: Path) -> None:
    jobs = count_jobs(usable_cores(), free_memory(), BUDGET_BYTES[request.kind], own=env("MOE_TK_BUILD_JOBS"),
                      bound=env("MAX_JOBS"))
    start = time.monotonic()
    with BuildProgress(f"{request.name} ({request.target}, {request.tool}, {jobs} at a time)", len(steps)) as progress:
        result = run_steps(ninja, work, steps, jobs=jobs, on_progress=progress.update,
                           environment=toolchain.child_environment(*(step.command[0] for step in steps)))
        if result.failure is not None:
            log = _write_log(final.with_suffix(".log"), result.log)
            raise BuildError(_explain(request.name, result.failure, log))
    _write_log(final.with_suffix(".log"), result.log)
    facts = {"name": request.name, "target": request.target, "tool": request.tool, "python": sys.version,
             "seconds": round(time.monotonic() - start, 1), "commands": [list(step.command) for step in steps]}
    (work / "facts.json").write_text(json.dumps(facts, indent=1))
    os.replace(work / "facts.json", final.with_suffix(".json"))
    publish(work / "module.so", final)


def _write_log(path: Path, text: str) -> str:
    try:
        path.write_text(text)
    except OSError as error:
        return f"not written ({error.strerror}: {path})"
    return str(path)


def _explain(name: str, failure: StepFailure, log: str) -> str:
    ended = "an unknown status" if failure.status is None else f"status {failure.status}"
    if failure.status is not None and 128 < failure.status < 160:
        ended += f" (killed by signal {failure.status - 128})"
    hint = hint_for(failure.stderr, failure.status) or "read the log from its first error on"
    tail = "\n".join(f"  {line}" for line in failure.tail.splitlines()) or "  (it printed nothing)"
    return (f"building {name} failed: a command ended with {ended}.\n"
            f"command: {failure.command}\nlast lines of its stderr:\n{tail}\nlog: {log}\nhint: {hint}")
