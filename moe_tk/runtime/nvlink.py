"""The native module of the CUDA back end over NVLink: built on first use, loaded once per process."""

from __future__ import annotations

from types import ModuleType

from moe_tk.builder.build import build_cuda_module, load_module
from moe_tk.builder.native_root import native_modules
from moe_tk.errors import BuildError
from moe_tk.memory.layout import CONTROL_BYTES
from moe_tk.memory.nvlink_layout import FLAG_LINE_BYTES, MAX_COL_GROUPS, MAX_GROUPS, MAX_TOKENS, OPEN_CLUSTER
from moe_tk.planner import FUSED_VARIANTS, FusedVariant

NAME = "moe_tk_nvlink"
ARCH = "90a"
TRACED_FLAGS = ("-DMOE_TK_TRACE",)
TRACED_SOURCES = ("tk_kernels/nvlink/clock_sync.cu",)
_modules: dict[bool, ModuleType] = {}


def nvlink_module(traced: bool = False) -> ModuleType:
    """The module; raises BuildError when it can be neither found in the cache nor built.

    traced  a second build of the same sources, whose kernels record what they do (moe_tk.runtime.stamps)
    """
    if traced not in _modules:
        sources = next(module.sources for module in native_modules() if module.name == NAME)
        name, more, flags = (f"{NAME}_traced", TRACED_SOURCES, TRACED_FLAGS) if traced else (NAME, (), ())
        module = load_module(build_cuda_module(name, (*sources, *more), arch=ARCH, extra_flags=flags), name)
        have = (module.CONTROL_BYTES, module.FLAG_LINE_BYTES, module.MAX_GROUPS, module.MAX_COL_GROUPS, module.OPEN_CLUSTER,
                module.MAX_TOKENS, *(compiled_variants(module, quantised) for quantised in (False, True)))
        want = (CONTROL_BYTES, FLAG_LINE_BYTES, MAX_GROUPS, MAX_COL_GROUPS, OPEN_CLUSTER, MAX_TOKENS, *FUSED_VARIANTS.values())
        if have != want:
            raise BuildError(f"{module.__file__} has sizes {have}, this package expects {want}: clear the module cache")
        _modules[traced] = module
    return _modules[traced]


def compiled_variants(module: ModuleType, quantised: bool) -> tuple[FusedVariant, ...]:
    """What the planner has in FUSED_VARIANTS, as the module says it."""
    fields = "name", "row_block", "gather_cols", "scatter_cols", "placed"
    return tuple(FusedVariant(*(variant[field] for field in fields)) for variant in module.variants(quantised))
