"""Named tensors as the bytes of a safetensors file, and records as plain data for its header and named tensors.

Tensors are not copied: a model may take half of the memory. The codec of records goes by the annotations of a
NamedTuple's fields, so that a new field is written and read without another line.

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

import json
import math
import os
import struct
import types
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import IO, Any, NamedTuple, Union, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from atoll.core.wire import bytes_of

DTYPES = {
    torch.int64: "I64",
    torch.float64: "F64",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Type -> its name in the format, in the order of the layout: the widest first, so that all tensors are aligned."""
NO_TEXT: Mapping[str, str] = MappingProxyType({})


class Deferred(NamedTuple):
    """A tensor that is read when it is its turn to be written."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    load: Callable[[], Tensor]

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


def tensor_file(
    tensors: Mapping[str, Tensor | Deferred], text: Mapping[str, str] = NO_TEXT
) -> Iterator[bytes | memoryview]:
    """Yield the parts of the file in order; tensors may share memory, and `text` becomes metadata of the header."""
    ranks = {dtype: rank for rank, dtype in enumerate(DTYPES)}
    names = sorted(tensors, key=lambda name: (ranks[tensors[name].dtype], name))
    header: dict[str, object] = {"__metadata__": dict(text)} if text else {}
    end = 0
    for name in names:
        tensor = tensors[name]
        start, end = end, end + tensor.nbytes
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    header_bytes = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    header_bytes += b" " * (-len(header_bytes) % 8)
    yield struct.pack("<Q", len(header_bytes))
    yield header_bytes
    for name in names:
        tensor = tensors[name]
        yield bytes_of(tensor.load() if isinstance(tensor, Deferred) else tensor)


class TensorReader(Mapping[str, Tensor]):
    """The tensors of a file, each read when it is asked for; mapped memory would count as this process's own."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        size = file.seek(0, os.SEEK_END)
        file.seek(0)
        (length,) = struct.unpack("<Q", file.read(8))
        if length > size - 8:
            raise ValueError("its header is longer than the file")
        header = json.loads(file.read(length))
        self.text: dict[str, str] = header.pop("__metadata__", {})
        self._start, self._header = 8 + length, header

    def __getitem__(self, name: str) -> Tensor:
        entry = self._header[name]
        start, end = entry["data_offsets"]
        self._file.seek(self._start + start)
        data = bytearray(self._file.read(end - start))
        if len(data) != end - start:
            raise ValueError(f"tensor {name} is cut off")
        dtype = next(dtype for dtype, text in DTYPES.items() if text == entry["dtype"])
        flat = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
        return flat.view(
            entry["shape"]
        ).clone()  # sums and products have other last bits in memory not aligned by torch

    def __iter__(self) -> Iterator[str]:
        return iter(self._header)

    def __len__(self) -> int:
        return len(self._header)


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
