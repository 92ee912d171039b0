"""The idx file format of MNIST: a magic number, the dimensions in big-endian order, then the bytes of the array."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np

from atoll.core.errors import DataError

Array = np.ndarray[Any, np.dtype[Any]]

UBYTE = 0x08


def read_idx(path: Path) -> Array:
    """Read an array of unsigned bytes (LeCun et al. 1998, the format of the MNIST files)."""
    with path.open("rb") as stream:
        head = stream.read(4)
        if len(head) != 4 or head[:3] != bytes((0, 0, UBYTE)):
            raise DataError(
                f"{path} is not an idx file of unsigned bytes: it starts with {head.hex(' ') or 'nothing'}; remove it, "
                "and it will be fetched again"
            )
        num_dims = head[3]
        dims = stream.read(4 * num_dims)
        if len(dims) != 4 * num_dims:
            raise DataError(f"{path} ends inside its header; remove it, and it will be fetched again")
        shape = struct.unpack(f">{num_dims}I", dims)
        values = np.fromfile(stream, dtype=np.uint8)
    if values.size != np.prod(shape, dtype=np.int64):
        raise DataError(
            f"{path} has shape {shape} in its header but {values.size} bytes; remove it, and it will be fetched again"
        )
    return values.reshape(shape)


def write_idx(path: Path, values: Array) -> None:
    """Write an array of unsigned bytes; equal arrays give equal files, so that a checksum identifies them."""
    with path.open("wb") as stream:
        stream.write(bytes((0, 0, UBYTE, values.ndim)) + struct.pack(f">{values.ndim}I", *values.shape))
        np.ascontiguousarray(values, dtype=np.uint8).tofile(stream)
