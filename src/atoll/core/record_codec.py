"""A codec for records of numbers and tensors: plain data for JSON, and a flat table of the tensors.

It goes by the annotations of a NamedTuple's fields, so that a new field is written and read without another line.

>>> from typing import NamedTuple
>>> class Point(NamedTuple):
...     at: tuple[int, ...]
...     names: dict[int, str]
>>> plain = to_plain(Point((1, 2), {3: "three"}), {})
>>> plain
{'at': [1, 2], 'names': [[3, 'three']]}
>>> from_plain(Point, plain, {})
Point(at=(1, 2), names={3: 'three'})
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Union, get_args, get_origin, get_type_hints

from torch import Tensor


def to_plain(value: Any, tensors: dict[str, Tensor], path: str = "") -> Any:
    """Return a value as JSON has it; its tensors go into the table, each under its place."""
    if isinstance(value, Tensor):
        tensors[path] = value
        return path
    if hasattr(value, "to_plain"):
        return value.to_plain()
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        fields: tuple[str, ...] = type(value)._fields
        return {name: to_plain(each, tensors, _below(path, name)) for name, each in zip(fields, value, strict=True)}
    if isinstance(value, tuple | list):
        return [to_plain(each, tensors, _below(path, place)) for place, each in enumerate(value)]
    if isinstance(value, Mapping):
        pairs = enumerate(value.items())
        return [
            [to_plain(key, tensors), to_plain(each, tensors, _below(path, _name(key, place)))]
            for place, (key, each) in pairs
        ]
    return value


def from_plain(kind: Any, plain: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Undo `to_plain` for a value of this type."""
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        if plain is None:
            return None
        [kind] = [each for each in args if each is not type(None)]
        return from_plain(kind, plain, tensors)
    if kind is Tensor:
        return tensors[plain]
    if hasattr(kind, "from_plain"):
        return kind.from_plain(plain)
    if hasattr(kind, "_fields"):
        fields = _fields(kind)
        return kind(**{name: from_plain(fields[name], each, tensors) for name, each in plain.items()})
    if origin is tuple:
        return tuple(from_plain(args[0], each, tensors) for each in plain)
    if origin in (dict, Mapping):
        return {from_plain(args[0], key, tensors): from_plain(args[1], each, tensors) for key, each in plain}
    return plain


@lru_cache(maxsize=64)
def _fields(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)


def _name(key: Any, place: int) -> str:
    """Return what an entry of a table is called among the tensors: by its key if that is short."""
    return str(key) if isinstance(key, str | int) else str(place)


def _below(path: str, name: object) -> str:
    return f"{path}/{name}" if path else str(name)
