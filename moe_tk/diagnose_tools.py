"""What builds and runs use, as facts for the doctor: every nvcc, compiler and header, the choice, what is missing."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Sequence

from moe_tk.config import env
from moe_tk.errors import BuildError
from moe_tk.topology.facts import Problem, ToolFact


def read_tools(archs: Sequence[str]) -> tuple[list[ToolFact], list[Problem]]:
    """Facts and problems. archs: of the GPUs here ("sm_90"); without any, nvcc is listed but may be missing."""
    from moe_tk.builder import cuda_toolkit, toolchain

    torch_cuda = cuda_toolkit.torch_cuda_version()
    facts, problems = _read_torch(torch_cuda, bool(archs))
    for found in (_read_nvcc(cuda_toolkit, archs, torch_cuda), _read_host(toolchain)):
        facts += found[0]
        problems += found[1]
    return facts, problems


def _read_torch(torch_cuda: str | None, gpus: bool) -> tuple[list[ToolFact], list[Problem]]:
    """torch without importing it: its version and the CUDA it was built for."""
    if importlib.util.find_spec("torch") is None:
        return [ToolFact("torch", note="not installed")], [Problem("torch-missing")]
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        version = None
    fact = ToolFact("torch", version=version, chosen=True, note=f"CUDA {torch_cuda}" if torch_cuda else "without CUDA")
    if gpus and torch_cuda is None:
        return [fact], [Problem("torch-without-cuda", {"version": version, "cuda": None})]
    return [fact], []


def _read_nvcc(cuda_toolkit, archs: Sequence[str], torch_cuda: str | None) -> tuple[list[ToolFact], list[Problem]]:
    from moe_tk.builder.arch import parse_arch

    candidates = cuda_toolkit.find_toolkits()
    try:
        image = parse_arch(max(archs, key=lambda arch: int(arch[3:]), default="sm_90"))
    except BuildError as error:
        return [], [Problem("nvcc-missing", {"why": str(error)})]
    allow = env("MOE_TK_ALLOW_CUDA_MISMATCH")
    choice = cuda_toolkit.choose_toolkit(image, candidates, torch_cuda, allow_mismatch=allow)
    facts, problems = [], []
    for candidate, verdict in choice.verdicts:
        note = choice.reason if candidate is choice.chosen else verdict
        version = cuda_toolkit.dotted(candidate.version) if candidate.version else None
        facts.append(ToolFact("nvcc", str(candidate.nvcc), version, candidate is choice.chosen, note))
    if choice.chosen is not None:
        root = choice.chosen.root
        facts += [ToolFact(name, str(root / name) if there else None, note="" if there else "missing")
                  for name, there in choice.chosen.files.items() if name != "bin/nvcc"]
        if archs:
            problems += [Problem("nvcc-headers-minor", {"text": text}) for text in choice.warnings]
    elif archs:
        crossing = [(c, verdict) for c, verdict in choice.verdicts if verdict.startswith("built for")]
        if crossing:
            problems.append(Problem("nvcc-torch-major", {"text": f"{crossing[0][0].label}: {crossing[0][1]}"}))
        else:
            problems.append(Problem("nvcc-missing", {"why": choice.reason.partition(". ")[0]}))
    return facts, problems


def _read_host(toolchain) -> tuple[list[ToolFact], list[Problem]]:
    choice = toolchain.find_host_compiler()
    facts = [ToolFact("C++ compiler", " ".join(c.command), c.version or None, c is choice.chosen,
                      choice.reason if c is choice.chosen else c.problem or "not needed") for c in choice.candidates]
    problems = []
    if choice.chosen is None:
        facts.append(ToolFact("C++ compiler", note=choice.reason))
        problems.append(Problem("tool-missing", {"what": "C++ compiler", "why": choice.reason,
                                                 "fix": toolchain.HOW_TO_INSTALL}))
    for needed in (toolchain.find_ninja(), toolchain.find_python_headers(), toolchain.find_pybind11()):
        path = str(needed.path) if needed.path else None
        facts.append(ToolFact(needed.what, path, None, path is not None, needed.problem or ""))
        if needed.path is None:
            problems.append(Problem("tool-missing", {"what": needed.what, "why": needed.problem or "missing",
                                                     "fix": "install it"}))
    return facts, problems
