"""GPU architectures: names as users write them -> the image we build, and which image runs on which GPU.

Kernels use instructions that exist only under the "a" (architecture-specific) names from SM90 on, so `9.0` means
`90a` here. Everything in this file is a pure function of its arguments.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from moe_tk.errors import BuildError

# First CUDA toolkit (major, minor) whose nvcc knows a compute capability, and the first that speaks C++20.
_FIRST_CUDA = {
    80: (11, 0), 86: (11, 1), 87: (11, 4), 88: (13, 0), 89: (11, 8), 90: (11, 8),
    100: (12, 8), 103: (12, 9), 110: (13, 0), 120: (12, 8), 121: (12, 9),
}
FIRST_CUDA_WITH_CPP20 = (12, 0)
_FIRST_CUDA_WITH_FAMILY = (12, 9)
SUPPORTED = tuple(f"{number}a" if number >= 90 else str(number) for number in sorted(_FIRST_CUDA))
_PATTERN = re.compile(r"(?:sm_?|compute_?)?(\d+)(?:\.(\d))?([af]?)(\+ptx)?", re.IGNORECASE)


class ArchUnknown(BuildError):
    """Nothing says which architectures to build for."""


@dataclass(frozen=True, slots=True)
class Arch:
    """One image: `number` is the compute capability times ten, `suffix` is "a", "f" or "".

    `note` says what was changed in what the user wrote, or is None.
    """

    number: int
    suffix: str
    note: str | None = None

    @property
    def name(self) -> str:
        """As in sm_NAME, for example `90a`."""
        return f"{self.number}{self.suffix}"

    @property
    def first_cuda(self) -> tuple[int, int]:
        """The oldest CUDA toolkit (major, minor) that can build this image with C++20."""
        wanted = [_FIRST_CUDA[self.number], FIRST_CUDA_WITH_CPP20]
        if self.suffix == "f":
            wanted.append(_FIRST_CUDA_WITH_FAMILY)
        return max(wanted)

    @property
    def nvcc_flags(self) -> tuple[str, ...]:
        return (f"-gencode=arch=compute_{self.name},code=sm_{self.name}",)


def parse_arch(text: str | tuple[int, int]) -> Arch:
    """Normalise `9.0`, `9.0a`, `9.0+PTX`, `90a`, `sm_90a`, `compute_90` or a capability (9, 0).

    Raises BuildError naming the text and the valid ones when it is none of these or no architecture that we know.
    """
    written = f"{text[0]}.{text[1]}" if isinstance(text, tuple) else text.strip()
    match = _PATTERN.fullmatch(written)
    number = int(match[1] + (match[2] or "")) if match else 0
    if match is None or number not in _FIRST_CUDA:
        raise BuildError(f"GPU architecture {written!r} is unknown; valid ones are {', '.join(SUPPORTED)}, "
                         "or the same written as a capability, such as 9.0")
    suffix = match[3].lower()
    notes = []
    if suffix == "" and number >= 90:
        suffix = "a"
        notes.append(f"{written} is built as {number}a: the kernels use instructions that only that name has")
    elif suffix and number < 90 or suffix == "f" and number < 100:
        raise BuildError(f"GPU architecture {written!r}: there is no {number}{suffix}; "
                         f"use {number if number < 90 else f'{number}a'}")
    if match[4]:
        notes.append(f"+PTX in {written} is left out: each GPU gets an image of its own")
    return Arch(number, suffix, "; ".join(notes) or None)


def parse_arch_list(text: str) -> list[Arch]:
    """Normalise a list in the form of TORCH_CUDA_ARCH_LIST: parts between ";", "," or blanks; repeats are dropped."""
    found: dict[str, Arch] = {}
    for part in re.split(r"[;,\s]+", text.strip()):
        if part:
            arch = parse_arch(part)
            found.setdefault(arch.name, arch)
    return list(found.values())


def resolve_archs(requested: Sequence[str], arch_list: str | None,
                  capabilities: Callable[[], Iterable[tuple[int, int]]]) -> list[Arch]:
    """What to build for: the request, else the list of TORCH_CUDA_ARCH_LIST, else the GPUs seen.

    `capabilities` gives (major, minor) of the GPUs, or nothing; it is not called when a list says what is wanted, so
    that such a build touches no device. Raises ArchUnknown naming the variable when nothing says it.
    """
    archs = parse_arch_list(";".join(requested)) or parse_arch_list(arch_list or "")
    if not archs:
        archs = parse_arch_list(";".join(f"{major}.{minor}" for major, minor in capabilities()))
    if not archs:
        raise ArchUnknown("no GPU is visible and no architecture is named: set TORCH_CUDA_ARCH_LIST "
                          '(for example "9.0a;12.0a") or say which with --arch 90a')
    return archs


def check_toolkit(arch: Arch, version: tuple[int, int], place: str) -> str | None:
    """None if nvcc of this version can build the image; else why not, as one sentence."""
    if version >= arch.first_cuda:
        return None
    wanted = ".".join(map(str, arch.first_cuda))
    family = "f (family)" if arch.suffix == "f" else ""
    return f"SM{arch.number}{family} needs CUDA >= {wanted}, found {version[0]}.{version[1]} at {place}"


def image_runs_on(arch: Arch, capability: tuple[int, int]) -> bool:
    """Whether a binary image loads on a GPU: "a" on exactly its own, "f" on its family, plain on later minors too."""
    major, minor = divmod(arch.number, 10)
    if arch.suffix == "a":
        return (major, minor) == capability
    return major == capability[0] and minor <= capability[1]


def check_image(built: Iterable[str], capability: tuple[int, int]) -> None:
    """Raise BuildError naming built and needed architectures when no image runs on the GPU."""
    archs = [parse_arch(name) for name in built]
    if any(image_runs_on(arch, capability) for arch in archs):
        return
    needed = parse_arch(capability).name
    have = ", ".join(f"sm_{arch.name}" for arch in archs) or "nothing"
    raise BuildError(f"the GPU has compute capability {capability[0]}.{capability[1]} and needs sm_{needed}, but built "
                     f"is {have}. Build it with: moe_tk build --arch {needed}")
