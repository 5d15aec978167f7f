"""Host side of the toolchain: C++ compiler, ninja, headers of Python and pybind11, the CPU we tune for.

Every candidate, the choice and its reason are plain data, so that a doctor can print them. Nothing here raises for
what is merely absent: `HostChoice.require()` does, when a compiler is really needed.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from moe_tk.config import env
from moe_tk.errors import BuildError

OLDEST_COMPILER = {"gcc": 11, "clang": 15}  # first with all of <atomic>, <concepts> and <span> of C++20 that we use
HOW_TO_INSTALL = "install g++ (Debian, Ubuntu: apt-get install g++), or set CXX to a C++20 compiler"
_PROBE_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class CompilerCandidate:
    """A host compiler that was looked at. `problem` is None if it can be used."""

    source: str                # "CXX" or "PATH"
    command: tuple[str, ...]   # the program, and arguments that came with CXX
    kind: str                  # "gcc", "clang" or "unknown"
    version: str               # "12.2.0", "" when unknown
    identity: str              # all that `--version` prints, and the target
    problem: str | None = None

    @property
    def label(self) -> str:
        return f"{' '.join(self.command)} {self.version}".strip()

    @property
    def short_label(self) -> str:
        return f"{os.path.basename(self.command[-1])} {self.version}".strip()


@dataclass(frozen=True, slots=True)
class HostChoice:
    """The host compiler that builds will use, why, and all that were looked at."""

    chosen: CompilerCandidate | None
    reason: str
    candidates: tuple[CompilerCandidate, ...]

    def require(self) -> CompilerCandidate:
        """The chosen compiler. Raises BuildError with every candidate and its problem when there is none."""
        if self.chosen is None:
            raise BuildError(f"no usable C++20 compiler: {self.reason}. To mend it: {HOW_TO_INSTALL}.")
        return self.chosen


@dataclass(frozen=True, slots=True)
class NeededFile:
    """A program or header that a build uses, with its place, or with what is wrong."""

    what: str
    path: Path | None
    problem: str | None = None

    def require(self) -> Path:
        if self.path is None:
            raise BuildError(self.problem or f"{self.what} is missing")
        return self.path


def find_host_compiler() -> HostChoice:
    """Look at CXX if set (nothing else is then used), otherwise at g++, clang++ and c++ on PATH, in that order."""
    own = env("CXX")
    if own:
        candidate = _judge_compiler("CXX", tuple(shlex.split(own)))
        if candidate.problem:
            return HostChoice(None, f"CXX={own!r} is set, but {candidate.problem}", (candidate,))
        return HostChoice(candidate, "CXX names it", (candidate,))
    found = [path for name in ("g++", "clang++", "c++") if (path := shutil.which(name))]
    candidates = tuple(_judge_compiler("PATH", (path,)) for path in found)
    for candidate in candidates:
        if candidate.problem is None:
            return HostChoice(candidate, "first usable one of g++, clang++, c++ on PATH", candidates)
    reason = "; ".join(f"{c.label}: {c.problem}" for c in candidates) or "neither g++, clang++ nor c++ is on PATH"
    return HostChoice(None, f"{reason} (CXX is not set)", candidates)


def _judge_compiler(source: str, command: tuple[str, ...]) -> CompilerCandidate:
    program = shutil.which(command[0]) if command else None
    if program is None:
        return CompilerCandidate(source, command, "unknown", "", "", f"{' '.join(command)!r} is not a program on PATH")
    command = (program, *command[1:])
    text, problem = run_probe((*command, "--version"))
    target, _ = run_probe((*command, "-dumpmachine"))
    if problem:
        return CompilerCandidate(source, command, "unknown", "", text, problem)
    # Apple and distributions put their names first: "g++ (Debian 12.2.0-14) 12.2.0", "Debian clang version 14.0.6"
    is_gcc = re.search(r"Free Software Foundation|\bg(cc|\+\+)", text)
    kind = "clang" if "clang" in text else "gcc" if is_gcc else "unknown"
    first_line = re.sub(r"\([^)]*\)", "", text.partition("\n")[0])
    match = re.search(r"(\d+)\.\d+(?:\.\d+)?", first_line)
    version = match[0] if match else ""
    oldest = OLDEST_COMPILER.get(kind)
    if match and oldest and int(match[1]) < oldest:
        problem = f"{kind} {version} is too old for our C++20, wanted >= {oldest}"
    return CompilerCandidate(source, command, kind, version, f"{text}\n{target}".strip(), problem)


def run_probe(command: tuple[str, ...]) -> tuple[str, str | None]:
    """What a short command prints, and what went wrong with it or None. Never raises. Remembered per process."""
    try:
        info = os.stat(command[0])
        stamp = (info.st_mtime_ns, info.st_size)
    except OSError:
        stamp = (0, 0)
    return _run_probe(command, stamp, os.environ.get("PATH", ""))


@functools.lru_cache(maxsize=64)
def _run_probe(command: tuple[str, ...], _stamp: tuple[int, int], _path: str) -> tuple[str, str | None]:
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                              timeout=_PROBE_TIMEOUT_S, env=child_environment(), errors="replace")
    except (OSError, subprocess.TimeoutExpired) as error:
        return "", f"{shlex.join(command)} does not run: {error}"
    if done.returncode != 0:
        last = done.stdout.strip().splitlines()[-1:] or ["no output"]
        return done.stdout, f"{shlex.join(command)} ended with status {done.returncode}: {last[0]}"
    return done.stdout, None


def child_environment(*programs: str) -> dict[str, str]:
    """Environment for compilers: messages in English, and a PATH that has the system's tools and these programs'."""
    child = dict(os.environ)
    child["LC_ALL"] = "C"
    folders = [child.get("PATH", ""), *(os.path.dirname(program) for program in programs), "/usr/bin", "/bin"]
    child["PATH"] = os.pathsep.join(dict.fromkeys(folder for folder in folders if folder))
    return child


# Variables that silently change what a compiler does; they are part of a module's identity.
COMPILER_VARIABLES = ("CPATH", "C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH", "LIBRARY_PATH", "COMPILER_PATH",
                      "GCC_EXEC_PREFIX", "NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS")


def compiler_variables() -> str:
    return "\n".join(f"{name}={value}" for name in COMPILER_VARIABLES if (value := os.environ.get(name)))


def find_ninja() -> NeededFile:
    """The ninja of the PyPI package, which is a dependency of ours, else one on PATH."""
    places = []
    try:
        for file in importlib.metadata.distribution("ninja").files or ():
            if file.name == "ninja":
                places.append(Path(str(file.locate())))
    except importlib.metadata.PackageNotFoundError:
        pass
    places.append(Path(sys.executable).parent / "ninja")
    for place in places:
        if place.is_file() and os.access(place, os.X_OK):
            return NeededFile("ninja", place.resolve())
    if on_path := shutil.which("ninja"):
        return NeededFile("ninja", Path(on_path))
    return NeededFile("ninja", None, "ninja is missing: it is neither installed as a Python package nor on PATH. "
                                     "Install it: python -m pip install ninja")


def find_python_headers() -> NeededFile:
    """Folder with Python.h of the running interpreter."""
    for kind in ("include", "platinclude"):
        folder = Path(sysconfig.get_path(kind))
        if (folder / "Python.h").is_file():
            return NeededFile("Python.h", folder)
    return NeededFile("Python.h", None, f"the C headers of Python are missing: no Python.h in {folder}. Install "
                                        "python3-dev (Debian, Ubuntu) or python3-devel (Fedora)")


def find_pybind11() -> NeededFile:
    """Folder with pybind11/pybind11.h."""
    spec = importlib.util.find_spec("pybind11")
    if spec is not None and spec.origin:
        folder = Path(spec.origin).parent / "include"
        if (folder / "pybind11" / "pybind11.h").is_file():
            return NeededFile("pybind11", folder)
    return NeededFile("pybind11", None, "the pybind11 headers are missing: python -m pip install pybind11")


def pybind11_version() -> str:
    try:
        return importlib.metadata.version("pybind11")
    except importlib.metadata.PackageNotFoundError:
        return "none"


@functools.cache
def python_abi() -> str:
    """Names the binary interface of this interpreter: a module built for another one does not load."""
    return f"{sys.implementation.cache_tag} {sysconfig.get_config_var('SOABI')} {platform.machine()}"


@functools.cache
def cpu_identity() -> str:
    """Model and features of the CPU: code tuned with -march=native is only valid where these are the same."""
    wanted = ("vendor_id", "cpu family", "model", "model name", "flags", "Features", "CPU implementer", "CPU part",
              "CPU variant", "isa", "cpu")
    try:
        text = Path("/proc/cpuinfo").read_text(errors="replace")
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    lines = {line.strip() for line in text.splitlines() if line.partition(":")[0].strip() in wanted}
    return "\n".join((platform.machine(), *sorted(lines)))


def native_tuning(compiler: CompilerCandidate | None) -> tuple[str, ...]:
    """The flag that tunes for this CPU. x86 compilers call it -march, some of the others only know -mcpu."""
    if platform.machine() in ("x86_64", "AMD64") or compiler is None:
        return ("-march=native",)
    for flag in ("-mcpu=native", "-march=native"):
        _, problem = run_probe((*compiler.command, flag, "-x", "c++", "-E", "-o", os.devnull, os.devnull))
        if problem is None:
            return (flag,)
    return ()
