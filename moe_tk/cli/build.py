"""`moe_tk build`: compile the native modules ahead, so that the first call of a layer finds them."""

from __future__ import annotations

import argparse

from moe_tk.builder.arch import Arch, ArchUnknown, resolve_archs
from moe_tk.builder.build import build_cuda_module, build_host_module
from moe_tk.builder.native_root import native_modules, native_root
from moe_tk.config import env
from moe_tk.errors import BuildError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = ("Compile the native modules ahead of their first use. Without options: the host modules, and "
                          "the CUDA modules if this version has any, for TORCH_CUDA_ARCH_LIST or the GPUs seen.")
    parser.add_argument("--arch", action="append", default=[], metavar="ARCH",
                        help="build CUDA modules for it (90a, 9.0, sm_120a; several: repeat it or use ;); needs no GPU")
    parser.add_argument("--host", action="store_true", help="build the host modules")


def run(args: argparse.Namespace) -> int:
    """Build what was asked for and print one line for each module: its name, its target, its path."""
    modules = native_modules()
    hosts = [module for module in modules if module.kind == "host"]
    cudas = [module for module in modules if module.kind == "cuda"]
    everything = not args.host and not args.arch
    if args.arch and not cudas:
        raise BuildError(f"--arch {' '.join(args.arch)}: this version has no CUDA modules, "
                         f"{native_root() / 'tk_kernels' / 'bindings'} has no *_module.cu")
    if args.host or everything:
        for module in hosts:
            print(f"{module.name} host {build_host_module(module.name, module.sources)}", flush=True)
    if args.arch or (everything and cudas):
        for arch in _archs(args.arch):
            for module in cudas:
                path = build_cuda_module(module.name, module.sources, arch=arch.name)
                print(f"{module.name} sm_{arch.name} {path}", flush=True)
    return 0


def _archs(requested: list[str]) -> list[Arch]:
    """What to build for. Without a request, a list or a GPU: nothing, said in a note, since host modules may be all."""
    try:
        archs = resolve_archs(requested, env("TORCH_CUDA_ARCH_LIST"), _capabilities)
    except ArchUnknown as error:
        print(f"moe_tk: note: no CUDA modules are built: {error}")
        return []
    for arch in archs:
        if arch.note:
            print(f"moe_tk: note: {arch.note}")
    return archs


def _capabilities() -> list[tuple[int, int]]:
    """Compute capabilities of the GPUs that the driver's library lists; none where there is no driver."""
    try:
        import pynvml
    except ImportError:
        return []
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        return sorted({tuple(pynvml.nvmlDeviceGetCudaComputeCapability(handle)) for handle in handles})
    except pynvml.NVMLError:
        return []
    finally:
        pynvml.nvmlShutdown()
