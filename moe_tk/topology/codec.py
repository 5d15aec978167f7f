"""Frozen dataclasses <-> JSON: unknown fields are written as "unknown", and a reader ignores what it does not know."""

from __future__ import annotations

import dataclasses
import types
import typing
from typing import Any, TypeVar

from moe_tk.errors import TopologyError

UNKNOWN = "unknown"
T = TypeVar("T")


def to_plain(value: Any) -> Any:
    """Dataclasses, tuples and dicts as plain JSON data; None (a fact that nobody could read) becomes "unknown"."""
    if value is None:
        return UNKNOWN
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [to_plain(item) for item in value]
    return value


def from_plain(kind: type[T], data: Any, where: str = "") -> T:
    """The dataclass `kind` from what to_plain made of it.

    Fields that are missing take their default, unknown keys are ignored (a newer writer). Raises TopologyError naming
    the place when a value has the wrong shape.
    """
    where = where or kind.__name__
    if not isinstance(data, dict):
        raise TopologyError(f"{where}: wanted an object, found {type(data).__name__}")
    hints = typing.get_type_hints(kind)
    values = {}
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        if field.name in data:
            values[field.name] = _convert(hints[field.name], data[field.name], f"{where}.{field.name}")
    try:
        return kind(**values)
    except TypeError as error:
        raise TopologyError(f"{where}: {error}") from None


def _convert(hint: Any, data: Any, where: str) -> Any:
    if data is None or data == UNKNOWN:
        return None
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        kinds = [arg for arg in typing.get_args(hint) if arg is not type(None)]
        return _convert(kinds[0], data, where)
    if origin is tuple:
        if not isinstance(data, list):
            raise TopologyError(f"{where}: wanted a list, found {type(data).__name__}")
        item = typing.get_args(hint)[0]
        return tuple(_convert(item, entry, f"{where}[{i}]") for i, entry in enumerate(data))
    if origin is dict:
        if not isinstance(data, dict):
            raise TopologyError(f"{where}: wanted an object, found {type(data).__name__}")
        return {str(key): None if item == UNKNOWN else item for key, item in data.items()}
    if dataclasses.is_dataclass(hint):
        return from_plain(typing.cast(type, hint), data, where)
    if hint is Any:
        return data
    if hint is float and isinstance(data, int) and not isinstance(data, bool):
        return float(data)
    if not isinstance(data, hint) or (hint is int and isinstance(data, bool)):
        raise TopologyError(f"{where}: wanted {hint.__name__}, found {data!r}")
    return data


def check_schema(data: Any, wanted: str) -> None:
    """Raise TopologyError unless data["schema"] is `wanted`, which has the form name/major."""
    found = data.get("schema") if isinstance(data, dict) else None
    if found != wanted:
        raise TopologyError(f"this is not a {wanted} file: its schema is {found!r}. Make it again with this version of "
                            "moe_tk: moe_tk doctor --save FILE")
