"""Known ways in which a build fails -> what to do about them."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Hint:
    """`pattern` is searched in the compiler's output; `advice` may use its named groups."""

    pattern: re.Pattern[str]
    advice: str


def _hint(pattern: str, advice: str) -> Hint:
    return Hint(re.compile(pattern, re.IGNORECASE | re.MULTILINE), advice)


_OUT_OF_MEMORY = ("the compiler was killed, most likely because memory ran out: set MOE_TK_BUILD_JOBS=1, close other "
                  "programs, or give the container more memory")

# The first match wins, so causes come before their consequences.
HINTS = (
    _hint(r"no space left on device|disk quota exceeded|file size limit exceeded",
          "the disk is full: free some space, or set MOE_TK_CACHE_DIR (or TMPDIR) to a folder on another disk"),
    _hint(r"killed signal terminated program|virtual memory exhausted|cannot allocate memory|out of memory|bad_alloc|"
          r"died due to signal 9|^killed$", _OUT_OF_MEMORY),
    _hint(r"Python\.h: No such file|'Python\.h' file not found",
          "the C headers of Python are missing: install python3-dev (Debian, Ubuntu) or python3-devel (Fedora)"),
    _hint(r"pybind11/\S+: No such file|'pybind11/\S+' file not found",
          "the pybind11 headers are missing: python -m pip install --force-reinstall pybind11"),
    _hint(r"(?P<name>cuda\w*\.h|cuda/\S+): No such file|cannot open source file \"(?P<quoted>cuda\S+)\"",
          "a header of the CUDA toolkit is missing: install all of it, or set CUDA_HOME to one that has include/"),
    _hint(r"error: (?P<name>\S+): No such file or directory|'(?P<other>[^']+)' file not found|"
          r"cannot open source file \"(?P<quoted>[^\"]+)\"",
          "a header is missing; if it belongs to tk_kernels/ or thunderkittens/, the install is incomplete: reinstall "
          "moe-tk; if to the standard library, install g++ (not gcc alone)"),
    _hint(r"cannot execute '?cc1plus|cc1plus: no such file",
          "only a C compiler is installed: install g++ (Debian, Ubuntu) or gcc-c++ (Fedora)"),
    _hint(r"unsupported (gnu|clang) version",
          "nvcc does not accept this host compiler: set CXX to an older one that it does, for example CXX=g++-13"),
    _hint(r"unsupported gpu architecture|is not defined for option 'gpu-architecture'",
          "this nvcc is too old for the GPU: set CUDA_HOME to a newer toolkit; `moe_tk doctor` lists those found"),
    _hint(r"not supported on \.target|requires \.target",
          "the instruction needs the architecture-specific name: build with the letter, for example --arch 90a"),
    _hint(r"unrecognized (command[- ]line )?option '?-std=c\+\+20|invalid value 'c\+\+20'",
          "the compiler is too old for C++20: set CXX to g++ >= 11 or clang++ >= 15"),
    _hint(r"bad value .* for '?-m(arch|cpu)=|unsupported argument 'native'",
          "the compiler does not know this CPU: install a newer one and set CXX to it"),
    _hint(r"cannot find -l(?P<name>\S+)|unable to find library -l(?P<other>\S+)",
          "the linker misses a library: install the package that has it (with its -dev part)"),
    _hint(r"undefined reference to|undefined symbol|multiple definition of|ld returned|linker command failed",
          "the linker failed: a source file is missing from the module, or an object was made by another compiler; "
          "the log has the names"),
    _hint(r"read-only file system|permission denied",
          "a folder cannot be written: set MOE_TK_CACHE_DIR (and TMPDIR) to folders that can"),
    _hint(r"exec format error", "the compiler is made for another kind of machine: check CXX and CUDA_HOME"),
)


def hint_for(output: str, status: int | None) -> str | None:
    """Advice for a failed command with this output and exit status (128 + n after signal n), or None."""
    for hint in HINTS:
        if match := hint.pattern.search(output):
            names = [text for text in match.groupdict().values() if text]
            return f"{hint.advice} ({names[0]})" if names else hint.advice
    if status in (137, -9):
        return _OUT_OF_MEMORY
    if status in (139, -11, 134, -6):
        return "the compiler itself crashed: try again with MOE_TK_BUILD_JOBS=1, then with another compiler (CXX)"
    if status == 127:
        return "the program was not found when it was started: check CXX, CUDA_HOME and PATH"
    return None
