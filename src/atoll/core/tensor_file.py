"""The bytes of a safetensors file, without a copy of the tensors: a model may take half of the memory."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from types import MappingProxyType

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


def tensor_file(tensors: Mapping[str, Tensor], text: Mapping[str, str] = NO_TEXT) -> list[bytes | memoryview]:
    """Return the parts of the file in order; tensors may share memory, and `text` becomes metadata of the header."""
    ranks = {dtype: rank for rank, dtype in enumerate(DTYPES)}
    names = sorted(tensors, key=lambda name: (ranks[tensors[name].dtype], name))
    header: dict[str, object] = {"__metadata__": dict(text)} if text else {}
    views, end = [bytes_of(tensors[name]) for name in names], 0
    for name, view in zip(names, views, strict=True):
        tensor, start, end = tensors[name], end, end + len(view)
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    header_bytes = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    header_bytes += b" " * (-len(header_bytes) % 8)
    return [struct.pack("<Q", len(header_bytes)), header_bytes, *views]
