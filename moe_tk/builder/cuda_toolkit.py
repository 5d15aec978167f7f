"""CUDA side of the toolchain: every nvcc of the machine, what is wrong with each, and which one a build uses.

Torch is never imported here: the CUDA version it was built for is read from its files.
"""

from __future__ import annotations

import glob
import importlib.util
import os
import re
import shutil
from dataclasses import dataclass, field
from pathlib import Path

from moe_tk.builder.arch import FIRST_CUDA_WITH_CPP20, Arch, check_toolkit
from moe_tk.builder.toolchain import run_probe
from moe_tk.config import env
from moe_tk.errors import BuildError

# All that a build uses of a toolkit, relative to its folder: no object dumper, no runtime library outside of it.
USED_FILES = ("bin/nvcc", "bin/ptxas", "bin/cudafe++", "bin/fatbinary", "nvvm/bin/cicc", "include/cuda_runtime.h",
              "include/cuda.h")
HOW_SEARCHED = "CUDA_HOME, PATH, /usr/local/cuda*, the nvidia-cuda-nvcc Python package"

Version = tuple[int, int]


@dataclass(frozen=True, slots=True)
class ToolkitCandidate:
    """One nvcc that was found.

    `problem` says why it cannot be used at all (None if it can), `warnings` what may go wrong. Versions are
    (major, minor) or None when unknown. `files` tells of each of USED_FILES whether it is there.
    """

    source: str                      # "CUDA_HOME", "PATH", "/usr/local" or "Python package"
    nvcc: Path
    root: Path
    version: Version | None = None
    header_version: Version | None = None
    files: dict[str, bool] = field(default_factory=dict)
    problem: str | None = None
    warnings: tuple[str, ...] = ()
    identity: str = ""               # all that `nvcc --version` prints

    @property
    def label(self) -> str:
        version = dotted(self.version) if self.version else "unknown version"
        return f"nvcc {version} at {self.nvcc} ({self.source})"


@dataclass(frozen=True, slots=True)
class ToolkitChoice:
    """The toolkit for one architecture, the reason, and for every candidate its verdict in the order looked at."""

    chosen: ToolkitCandidate | None
    reason: str
    verdicts: tuple[tuple[ToolkitCandidate, str], ...]
    torch_cuda: str | None
    warnings: tuple[str, ...] = ()

    def require(self) -> ToolkitCandidate:
        """The chosen toolkit. Raises BuildError with every candidate and its verdict when there is none."""
        if self.chosen is None:
            raise BuildError(self.reason)
        return self.chosen


def dotted(version: Version) -> str:
    return f"{version[0]}.{version[1]}"


def torch_cuda_version() -> str | None:
    """The CUDA version that the installed torch was built for ("12.9"), None without torch or for a CPU build."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.origin:
        return None
    try:
        text = (Path(spec.origin).parent / "version.py").read_text()
    except OSError:
        return None
    match = re.search(r"^cuda\b[^=\n]*=\s*['\"]([\d.]+)['\"]", text, re.MULTILINE)
    return match[1] if match else None


def find_toolkits(local: str = "/usr/local") -> list[ToolkitCandidate]:
    """Every nvcc: CUDA_HOME, all of PATH, `local`/cuda* (newest first), Python packages. One entry per toolkit.

    A CUDA_HOME that is no folder with bin/nvcc is listed too, with that as its problem. Never raises.
    """
    found: dict[Path, ToolkitCandidate] = {}
    home = env("CUDA_HOME")
    if home:
        nvcc = Path(home) / "bin" / "nvcc"
        if not os.path.isabs(home) or not _is_program(nvcc):
            problem = f"CUDA_HOME={home!r} is not an absolute folder with bin/nvcc: correct it or unset it"
            found[Path(home)] = ToolkitCandidate("CUDA_HOME", nvcc, Path(home), problem=problem)
        else:
            _add(found, "CUDA_HOME", nvcc)
    for folder in os.environ.get("PATH", "").split(os.pathsep):
        if folder and _is_program(Path(folder, "nvcc")):
            _add(found, "PATH", Path(folder, "nvcc"))
    for root in sorted(glob.glob(f"{glob.escape(local)}/cuda*"), key=_version_in_name, reverse=True):
        if _is_program(Path(root, "bin", "nvcc")):
            _add(found, local, Path(root, "bin", "nvcc"))
    for root in _package_roots():
        if _is_program(root / "bin" / "nvcc"):
            _add(found, "Python package", root / "bin" / "nvcc")
    return list(found.values())


def choose_toolkit(arch: Arch, candidates: list[ToolkitCandidate], torch_cuda: str | None, *,
                   allow_mismatch: bool = False) -> ToolkitChoice:
    """Pick the first candidate that works, builds `arch` and has the CUDA major version of torch.

    Nothing matching: with `allow_mismatch` (MOE_TK_ALLOW_CUDA_MISMATCH) the first that works and builds `arch`, with
    a warning. A malformed CUDA_HOME is an error even if another candidate would do.
    """
    verdicts = tuple((candidate, _verdict(candidate, arch, torch_cuda)) for candidate in candidates)
    broken_home = next((c.problem for c in candidates if c.source == "CUDA_HOME" and c.version is None), None)
    usable = [c for c, verdict in verdicts if verdict == "usable"]
    crossing = [c for c, verdict in verdicts if verdict.startswith("built for")]
    if broken_home:
        return ToolkitChoice(None, broken_home, verdicts, torch_cuda)
    if usable or (crossing and allow_mismatch):
        chosen = (usable or crossing)[0]
        warnings = list(chosen.warnings)
        if not usable:
            warnings.append(f"{chosen.label} is used although torch was built for CUDA {torch_cuda}, because "
                            "MOE_TK_ALLOW_CUDA_MISMATCH is set")
        if candidates[0].source == "CUDA_HOME" and chosen is not candidates[0]:
            warnings.append(f"CUDA_HOME is passed over: {verdicts[0][1]}; {chosen.label} is used")
        matches = f" and matches torch's CUDA {torch_cuda}" if torch_cuda and usable else ""
        reason = f"first that builds sm_{arch.name}{matches}"
        return ToolkitChoice(chosen, reason, verdicts, torch_cuda, tuple(warnings))
    if not candidates:
        reason = f"no CUDA toolkit: no nvcc found in {HOW_SEARCHED}. Install one that builds sm_{arch.name} " \
                 f"(CUDA >= {dotted(arch.first_cuda)}) and set CUDA_HOME to its folder; the CPU backend needs none."
    else:
        listed = "; ".join(f"{c.label}: {verdict}" for c, verdict in verdicts)
        remedy = "set MOE_TK_ALLOW_CUDA_MISMATCH=1 to use it all the same, or " if crossing else ""
        reason = f"no CUDA toolkit can build sm_{arch.name}: {listed}. To mend it, {remedy}install CUDA " \
                 f">= {dotted(arch.first_cuda)}{f' of the line {torch_cuda}' if torch_cuda else ''} and set CUDA_HOME."
    return ToolkitChoice(None, reason, verdicts, torch_cuda)


def _verdict(candidate: ToolkitCandidate, arch: Arch, torch_cuda: str | None) -> str:
    if candidate.problem or candidate.version is None:
        return candidate.problem or "unknown version"
    too_old = check_toolkit(arch, candidate.version, str(candidate.nvcc))
    if too_old:
        return too_old
    if torch_cuda and int(torch_cuda.partition(".")[0]) != candidate.version[0]:
        return f"built for CUDA {candidate.version[0]}, but torch for CUDA {torch_cuda}"
    return "usable"


def _add(found: dict[Path, ToolkitCandidate], source: str, nvcc: Path) -> None:
    candidate = judge_nvcc(source, nvcc)
    found.setdefault(candidate.root.resolve(), candidate)


def judge_nvcc(source: str, nvcc: Path) -> ToolkitCandidate:
    """Run `nvcc --version`, find its toolkit folder, look for all files that a build uses. Never raises."""
    text, problem = run_probe((str(nvcc), "--version"))
    match = re.search(r"release (\d+)\.(\d+)", text)
    version = (int(match[1]), int(match[2])) if match else None
    root = _toolkit_root(nvcc)
    files = {name: (root / name).exists() for name in USED_FILES}
    header = _header_version(root)
    warnings = []
    if problem is None and version is None:
        problem = "its --version names no release"
    elif version and version < FIRST_CUDA_WITH_CPP20:
        problem = problem or f"CUDA {dotted(version)} has no C++20, wanted >= {dotted(FIRST_CUDA_WITH_CPP20)}"
    elif version and header and header[0] != version[0]:
        problem = problem or (f"nvcc is {dotted(version)} but its headers in {root / 'include'} are {dotted(header)}, "
                              "another major version: install both from one release")
    elif version and header and header != version:
        warnings.append(f"nvcc is {dotted(version)} but its headers in {root / 'include'} are {dotted(header)}: "
                        "install both from one release")
    missing = [name for name, there in files.items() if not there]
    if problem is None and missing:
        problem = f"the toolkit in {root} is incomplete, missing: {', '.join(missing)}"
    return ToolkitCandidate(source, nvcc, root, version, header, files, problem, tuple(warnings), text)


def _toolkit_root(nvcc: Path) -> Path:
    """The folder above bin/. For a wrapper script nvcc itself says where its toolkit is."""
    root = nvcc.resolve().parent.parent
    if not (root / "include" / "cuda_runtime.h").exists():
        text, _ = run_probe((str(nvcc), "--dryrun", "-c", "moe_tk.cu"))
        if match := re.search(r"^#\$ TOP=(.+)$", text, re.MULTILINE):
            return Path(match[1].strip()).resolve()
    return root


def _header_version(root: Path) -> Version | None:
    for name, macro in (("cuda.h", "CUDA_VERSION"), ("cuda_runtime_api.h", "CUDART_VERSION")):
        try:
            text = (root / "include" / name).read_text(errors="replace")
        except OSError:
            continue
        if match := re.search(rf"^\s*#\s*define\s+{macro}\s+(\d+)", text, re.MULTILINE):
            return divmod(int(match[1]) // 10, 100)
    return None


def _package_roots() -> list[Path]:
    spec = importlib.util.find_spec("nvidia")
    places = list(spec.submodule_search_locations or ()) if spec else []
    return [Path(root) for place in places for root in sorted(glob.glob(f"{glob.escape(place)}/c*"), reverse=True)]


def _is_program(path: Path) -> bool:
    return shutil.which(str(path)) is not None


def _version_in_name(path: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", os.path.basename(path)))
