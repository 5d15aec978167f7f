"""Which experts the tokens of all ranks go to: synthetic routings by name, the traces that ship, and files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_tk.bench.shapes import Shape
from moe_tk.errors import ArgumentError
from moe_tk.schedule.routings import Routing, flame_routing, make_routing, trace_routing

ZIPF_S = 1.2
NAMES = ("balanced", "uniform", "zipf[:S]", "hot[:EXPERT]", "hot_rank[:RANK]", "trace[:LAYER]", "flame[:LAYER]", "FILE[#KEY]")
ID_KEYS = ("topk_ids", "topk_idx", "ids", "data", "prefill_idx")  # tried in this order where a file's key is not named


def check_routing(spec: str) -> str:
    """`spec`, if it can be a routing as far as one can tell without a shape. Raises ArgumentError."""
    name, parameter = _split(spec)
    if _is_file(spec):
        if not Path(_file_and_key(spec)[0]).is_file():
            raise ArgumentError(f"routing {spec!r}: there is no such file")
    elif name not in _MAKERS:
        raise ArgumentError(f"routing {spec!r} is not known: wanted {', '.join(NAMES)}")
    elif parameter:
        _number(spec, parameter, float if name == "zipf" else int)
    return spec


def label(spec: str) -> str:
    """`spec` as results name it: a file without its folders, which say nothing to a reader."""
    path, key = _file_and_key(spec)
    return (Path(path).name + (f"#{key}" if key else "")) if _is_file(spec) else spec


def make(spec: str, shape: Shape, *, tokens: int, world: int, seed: int = 0) -> Routing:
    """ids and weights of world * tokens tokens; rank r has rows r * tokens ... Equal on all ranks.

    Traces and files are read in consecutive order from their first row, and again from there when they are too short.
    Raises ArgumentError when a trace or file does not fit the shape.
    """
    count = world * tokens
    if _is_file(spec):
        return _window(spec, _read_file(spec, seed), shape, count)
    name, parameter = _split(spec)
    return _MAKERS[name](spec, parameter, shape, count, world, seed)


def _split(spec: str) -> tuple[str, str]:
    name, _, parameter = spec.partition(":")
    return name, parameter


def _is_file(spec: str) -> bool:
    path = _file_and_key(spec)[0]
    return "/" in path or Path(path).suffix in _READERS


def _file_and_key(spec: str) -> tuple[str, str]:
    path, _, key = spec.partition("#")
    return path, key


def _number(spec: str, text: str, kind: type) -> Any:
    try:
        return kind(text)
    except ValueError:
        raise ArgumentError(f"routing {spec!r}: {text!r} is not {'a number' if kind is float else 'an integer'}") from None


def _synthetic(name: str) -> Callable[..., Routing]:
    def make_it(spec: str, parameter: str, shape: Shape, count: int, world: int, seed: int) -> Routing:
        options: dict[str, Any] = {}
        if name == "zipf":
            options["zipf_s"] = _number(spec, parameter, float) if parameter else ZIPF_S
        elif parameter and name in ("hot_expert", "hot_rank"):
            options["hot"] = _number(spec, parameter, int)
            limit = shape.experts if name == "hot_expert" else world
            if not 0 <= options["hot"] < limit:
                raise ArgumentError(f"routing {spec!r}: {options['hot']} is not in 0..{limit - 1}")
        elif parameter:
            raise ArgumentError(f"routing {spec!r}: {name} has no parameter")
        return make_routing(name, count, shape.experts, shape.top_k, world=world, seed=seed, **options)

    return make_it


def _shipped(read: Callable[..., Routing]) -> Callable[..., Routing]:
    def make_it(spec: str, parameter: str, shape: Shape, count: int, world: int, seed: int) -> Routing:
        found = read(_number(spec, parameter, int)) if parameter else read()
        return _window(spec, found, shape, count, experts=64)

    return make_it


_MAKERS: dict[str, Callable[..., Routing]] = {
    "balanced": _synthetic("balanced"), "uniform": _synthetic("uniform"), "zipf": _synthetic("zipf"),
    "hot": _synthetic("hot_expert"), "hot_rank": _synthetic("hot_rank"), "trace": _shipped(trace_routing),
    "flame": _shipped(flame_routing)}


def _window(spec: str, whole: Routing, shape: Shape, count: int, *, experts: int | None = None) -> Routing:
    """The first `count` rows, with more of the same behind them where there are fewer."""
    ids = whole.topk_ids
    if ids.shape[1] != shape.top_k or experts not in (None, shape.experts) or int(ids.max()) >= shape.experts:
        of = f"top {ids.shape[1]} of {experts or f'at least {int(ids.max()) + 1}'} experts"
        raise ArgumentError(f"routing {spec!r} is {of}; shape {shape.name} wants top {shape.top_k} of {shape.experts}")
    rows = torch.arange(count) % ids.shape[0]
    return Routing(ids[rows].contiguous(), whole.topk_weights[rows].contiguous())


def _read_npz(path: str) -> dict[str, Tensor]:
    import numpy as np

    with np.load(path, allow_pickle=False) as arrays:
        return {key: torch.from_numpy(arrays[key]) for key in arrays.files}


def _read_npy(path: str) -> dict[str, Tensor]:
    import numpy as np

    return {"data": torch.from_numpy(np.load(path, allow_pickle=False))}


def _read_safetensors(path: str) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return load_file(path)


def _read_torch(path: str) -> dict[str, Tensor]:
    loaded = torch.load(path, map_location="cpu", weights_only=True)
    return loaded if isinstance(loaded, dict) else {"data": loaded}


_READERS = {".npz": _read_npz, ".npy": _read_npy, ".safetensors": _read_safetensors, ".pt": _read_torch, ".pth": _read_torch}


def _read_file(spec: str, seed: int) -> Routing:
    """Ids [n, k] of a file (of the first layer where there are several); random weights: times do not depend on them."""
    path, key = _file_and_key(spec)
    reader = _READERS.get(Path(path).suffix)
    if reader is None:
        raise ArgumentError(f"routing {spec!r}: files end with {', '.join(_READERS)}")
    try:
        arrays = reader(path)
    except Exception as error:  # whatever these libraries raise for a file that is not one of theirs
        raise ArgumentError(f"routing {spec!r} cannot be read: {type(error).__name__}: {error}") from None
    key = key or next((name for name in ID_KEYS if name in arrays), "")
    if key not in arrays:
        raise ArgumentError(f"routing {spec!r}: it has {', '.join(map(str, arrays))}; name the one with the expert ids: FILE#KEY")
    ids = arrays[key]
    if not isinstance(ids, Tensor) or ids.is_floating_point() or ids.dim() not in (2, 3) or ids.numel() == 0:
        raise ArgumentError(f"routing {spec!r}: {key} is not a table of expert ids: wanted integers [n, k]")
    ids = (ids[0] if ids.dim() == 3 else ids).to(torch.int32)
    return Routing(ids, torch.rand(ids.shape, generator=torch.Generator().manual_seed(seed)))
