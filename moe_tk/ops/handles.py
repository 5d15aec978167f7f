"""Layers by number: torch ops take no Python objects, so a compiled call names its layer by a handle."""

from __future__ import annotations

import itertools
import weakref
from typing import Any

from moe_tk.errors import MoETkError

_layers: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_handles = itertools.count(1)


def keep_handle(layer: Any) -> int:
    """A new handle for a layer, valid as long as the layer lives."""
    handle = next(_handles)
    _layers[handle] = layer
    return handle


def find_layer(handle: int) -> Any:
    """The live layer of a handle; raises MoETkError when it is gone."""
    layer = _layers.get(handle)
    if layer is None:
        raise MoETkError(f"there is no MoELayer with handle {handle} in this process (any more)")
    return layer
