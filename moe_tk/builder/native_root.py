"""Where the C++ and CUDA sources are, and which modules they make.

Convention: `tk_kernels/bindings/X_module.cpp` is the host module `moe_tk_X`, and `tk_kernels/bindings/Y_module.cu`
is the CUDA module `moe_tk_Y`. All of `tk_kernels/probe/*.cu` make one CUDA module, `moe_tk_probe`, which the doctor loads.
A new binding needs no entry in a list. A module of several sources names the others, relative to the native root, in comment
lines `// with: PATH PATH` of its binding; they are compiled side by side.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from moe_tk.errors import BuildError

PROBE_MODULE = "moe_tk_probe"
NATIVE_FOLDERS = ("tk_kernels", "thunderkittens")
_IGNORED_SUFFIXES = frozenset({".md", ".o", ".so", ".pyc"})


@dataclass(frozen=True, slots=True)
class NativeModule:
    """One loadable module: its import name, `kind` "host" or "cuda", sources relative to the native root."""

    name: str
    kind: str
    sources: tuple[str, ...]


def native_root() -> Path:
    """The folder that holds tk_kernels/ and thunderkittens/.

    In an installed package that is `moe_tk/native`, in a checkout the folder above the package. Raises BuildError
    naming both when neither has tk_kernels/.
    """
    package = Path(__file__).resolve().parents[1]
    places = (package / "native", package.parent)
    for place in places:
        if (place / "tk_kernels").is_dir():
            return place
    raise BuildError(f"the native sources are missing: no folder tk_kernels in {places[0]} (where an install puts it) "
                     f"nor in {places[1]} (a checkout). Reinstall moe-tk.")


def native_modules(root: Path | None = None) -> list[NativeModule]:
    """All modules that the sources under `root` (default: native_root()) make, sorted by name."""
    root = root or native_root()
    bindings = root / "tk_kernels" / "bindings"
    kinds = {".cpp": "host", ".cu": "cuda"}
    modules = [
        NativeModule(name=f"moe_tk_{path.stem.removesuffix('_module')}", kind=kinds[path.suffix],
                     sources=(f"tk_kernels/bindings/{path.name}", *_companions(path)))
        for path in bindings.glob("*_module.*") if path.suffix in kinds
    ]
    probes = sorted((root / "tk_kernels" / "probe").glob("*.cu"))
    if probes:
        modules.append(NativeModule(PROBE_MODULE, "cuda", tuple(f"tk_kernels/probe/{path.name}" for path in probes)))
    return sorted(modules, key=lambda module: module.name)


def _companions(binding: Path) -> tuple[str, ...]:
    lines = re.findall(r"^// with: (.+)$", binding.read_text(), re.MULTILINE)
    return tuple(path for line in lines for path in line.split())


def hash_sources(root: Path, sources: Sequence[Path]) -> str:
    """SHA-256 over path and content of every file that can take part in a build, in a fixed order.

    With tk_kernels/ or thunderkittens/ under `root`: all files of both, and `sources`. Otherwise all files under
    `root`. Hidden files, caches, built objects and Markdown do not count. Raises BuildError on an unreadable file.
    """
    folders = [root / name for name in NATIVE_FOLDERS if (root / name).is_dir()] or [root]
    files = {path for folder in folders for path in _files_below(folder)} | {path.resolve() for path in sources}
    digest = hashlib.sha256()
    for path in sorted(files):
        try:
            content = path.read_bytes()
        except OSError as error:
            raise BuildError(f"cannot read the source file {path}: {error.strerror}") from error
        label = os.path.relpath(path, root)
        digest.update(f"{label}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()


def _files_below(folder: Path) -> Iterator[Path]:
    for parent, folders, names in os.walk(folder.resolve()):
        folders[:] = [name for name in folders if not name.startswith(".") and name != "__pycache__"]
        for name in names:
            if not name.startswith(".") and os.path.splitext(name)[1] not in _IGNORED_SUFFIXES:
                yield Path(parent, name)
