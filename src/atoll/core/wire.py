"""The bytes of an encoded update: `pack` writes them, `unpack` reads them without trusting the sender.

A message is a header, a table with a row for each tensor, and the bytes of all tensors one after another; docs/wire.md
specifies every byte. The table is checked before memory is allocated for it.

Shapes: N, the bytes of one tensor.
"""

from __future__ import annotations

import itertools
import math
import re
import struct
import sys
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
import zstandard
from torch import Tensor

from atoll.core.errors import AtollError
from atoll.core.messages import Payload

assert sys.byteorder == "little", "tensors are sent as they are in memory, which must be little-endian"

MAGIC = b"ATOL"
VERSION = 1
ZSTD = 1
"""The only flag: the bytes of the tensors are compressed."""
HEADER = struct.Struct("<4sBBHQ")
"""Magic, version, flags, number of sides, and the size in bytes of the whole uncompressed message."""
DTYPES = {
    1: torch.bool,
    2: torch.uint8,
    3: torch.int8,
    4: torch.int16,
    5: torch.int32,
    6: torch.int64,
    7: torch.float16,
    8: torch.bfloat16,
    9: torch.float32,
    10: torch.float64,
}
CODES = {dtype: code for code, dtype in DTYPES.items()}
NAME = re.compile(r"[!-~]{1,255}")
MAX_DIMS = 8
MAX_SIDES = 64
MAX_TENSORS = 1024
CHUNK = 1 << 20
"""Bytes compressed at once, and the memory that `unpack` needs beside the tensors. No table is longer."""
MAX_FRAME = CHUNK + CHUNK // 64
"""Maximum size in bytes of a compressed chunk: zstd produces no longer frame for CHUNK bytes."""
DAMAGED = "refuse it, or ask the sender to send it again"


class WireError(AtollError):
    """Bytes are not a payload, or a payload cannot be packed."""


def pack(payload: Payload, *, compress: bool = False) -> bytes:
    """Return a payload as bytes; equal payloads give equal bytes, in any order of their names.

    With `compress` the tensors are compressed by zstd, unless that would not make the message shorter.

    >>> pack(Payload(torch.tensor([1, -1], dtype=torch.int8))).hex(" ")
    '41 54 4f 4c 01 00 00 00 1c 00 00 00 00 00 00 00 03 01 02 00 00 00 00 00 00 00 01 ff'
    """
    return b"".join(pieces(payload, compress=compress))


def pieces(payload: Payload, *, compress: bool = False) -> list[bytes | memoryview]:
    """Return the parts that `pack` joins; without compression they are views of the tensors' memory, not copies."""
    table, tensors = _table(payload)
    views, start = [bytes_of(tensor) for tensor in tensors], HEADER.size + len(table)
    size = start + sum(map(len, views))
    plain: list[bytes | memoryview] = [HEADER.pack(MAGIC, VERSION, 0, len(payload.sides), size), table, *views]
    if not compress:
        return plain
    compressor, compressed_size = zstandard.ZstdCompressor(), start
    compressed: list[bytes | memoryview] = [HEADER.pack(MAGIC, VERSION, ZSTD, len(payload.sides), size), table]
    for chunk in recut(views, CHUNK):
        frame = compressor.compress(chunk)
        compressed += [struct.pack("<I", len(frame)), frame]
        compressed_size += len(frame) + 4
        if compressed_size >= size:
            return plain
    return compressed if compressed_size < size else plain


def recut(parts: Iterable[bytes | bytearray | memoryview], size: int) -> Iterator[memoryview]:
    """Yield the same bytes in pieces of `size`, the last maybe shorter; only pieces across parts are copied.

    >>> [bytes(piece) for piece in recut([b"ab", b"cdefg"], 3)]
    [b'abc', b'def', b'g']
    """
    views, missing = list[memoryview](), size
    for part in parts:
        view = memoryview(part)
        while view:
            views.append(view[:missing])
            view, missing = view[missing:], missing - len(views[-1])
            if missing == 0:
                yield _join(views)
                views, missing = [], size
    if views:
        yield _join(views)


def _join(views: list[memoryview]) -> memoryview:
    return views[0] if len(views) == 1 else memoryview(b"".join(views))


def packed_size(payload: Payload) -> int:
    """Return the number of bytes that `pack` gives without `compress`, without copying a tensor.

    >>> packed_size(Payload(torch.zeros(1000)))
    4026
    """
    table, tensors = _table(payload)
    return HEADER.size + len(table) + sum(tensor.nbytes for tensor in tensors)


def unpack(data: bytes | bytearray | memoryview, *, max_bytes: int) -> Payload:
    """Return the payload that `pack` wrote; anything else raises WireError.

    A message of more than `max_bytes`, compressed or not, is refused. Beside the tensors, which own their memory and
    are writable, it needs no more memory than a chunk and the objects of at most MAX_TENSORS tensors.
    """
    message = memoryview(data).cast("B")
    return unpack_parts([message], len(message), max_bytes=max_bytes)


def unpack_parts(parts: Iterable[bytes | bytearray | memoryview], num_bytes: int, *, max_bytes: int) -> Payload:
    """Unpack a message of `num_bytes` in parts, such as files, which is never in memory as a whole."""
    source = recut(parts, CHUNK)
    head = next(source, memoryview(b""))
    flags, num_sides, size = _read_header(head, num_bytes, max_bytes)
    rows, names, start = _read_table(head, num_sides, min(max_bytes, 1 << 62))
    described = start + sum(row.num_bytes for row in rows)
    if described != size:
        raise WireError(
            f"header and table contradict each other: {size} bytes declared, {described} described; {DAMAGED}"
        )
    body = _Source(itertools.chain([head[start:]], source))
    tensors = list(_read_tensors(rows, _decompressed(body, size - start) if flags & ZSTD else iter(body.next, None)))
    if body.next() is not None:
        raise WireError(f"more bytes arrived than were declared; {DAMAGED}")
    sides = iter(tensors[1:])
    return Payload(tensors[0], tuple({name: next(sides) for name in side} for side in names))


class _Source:
    """A reader of bytes that arrive in parts."""

    def __init__(self, parts: Iterator[memoryview]) -> None:
        self._parts, self._rest = parts, memoryview(b"")

    def next(self) -> memoryview | None:
        """Return the next bytes, in any number, or None at the end."""
        while not self._rest:
            part = next(self._parts, None)
            if part is None:
                return None
            self._rest = part
        part, self._rest = self._rest, memoryview(b"")
        return part

    def take(self, num: int) -> memoryview:
        """Return exactly the next `num` bytes."""
        views = list[memoryview]()
        while num:
            part = self.next()
            if part is None:
                raise WireError(f"cut off: {num} more bytes are needed; {DAMAGED}")
            views.append(part[:num])
            self._rest = part[num:]
            num -= len(views[-1])
        return _join(views) if views else memoryview(b"")


class _Row(NamedTuple):
    """The table's entry of one tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def _table(payload: Payload) -> tuple[bytes, list[Tensor]]:
    """Return the table, and the tensors in the order of the message."""
    num_tensors = 1 + sum(map(len, payload.sides))
    if len(payload.sides) > MAX_SIDES or num_tensors > MAX_TENSORS:
        raise WireError(
            f"a payload has at most {MAX_SIDES} sides and {MAX_TENSORS} tensors: got {len(payload.sides)} and "
            f"{num_tensors}; join small tensors into one"
        )
    tensors, parts = [payload.carrier], [_row(payload.carrier)]
    for side in payload.sides:
        names = sorted(side)
        _check_names(names)
        parts.append(struct.pack("<H", len(names)))
        for name in names:
            parts += [bytes([len(name)]), name.encode("ascii"), _row(side[name])]
            tensors.append(side[name])
    return b"".join(parts), tensors


def _row(tensor: Tensor) -> bytes:
    if tensor.dtype not in CODES or tensor.layout is not torch.strided or tensor.ndim > MAX_DIMS:
        raise WireError(
            f"cannot send a {tensor.layout} tensor of {tensor.dtype} with {tensor.ndim} dimensions: make it dense, "
            f"with at most {MAX_DIMS} dimensions, of {', '.join(str(dtype) for dtype in CODES)}"
        )
    return struct.pack(f"<BB{tensor.ndim}Q", CODES[tensor.dtype], tensor.ndim, *tensor.shape)


def bytes_of(tensor: Tensor) -> memoryview:
    """Return a view of a tensor's memory; only a tensor that is not contiguous or on another device is copied."""
    dense = tensor.detach().cpu().contiguous()
    bytes_N = dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)  # a view of one element may have any stride
    return bytes_N.numpy().data


def _check_names(names: list[str]) -> None:
    for name in names:
        if not NAME.fullmatch(name):
            raise WireError(
                f"tensors are named by 1 to 255 printable ASCII characters without spaces: got {name[:40]!a}"
            )
    if any(a >= b for a, b in itertools.pairwise(names)):
        raise WireError(f"the names of a side must be unique and in ascending order; {DAMAGED}")


def _read_header(message: memoryview, num_bytes: int, max_bytes: int) -> tuple[int, int, int]:
    """Return flags, number of sides and size, after checking that the message is complete."""
    if len(message) < HEADER.size or message[: len(MAGIC)] != MAGIC:
        raise WireError(f"not a payload: {num_bytes} bytes that do not start with {MAGIC!r}; {DAMAGED}")
    _, version, flags, num_sides, size = HEADER.unpack_from(message)
    if version != VERSION or flags & ~ZSTD:
        raise WireError(
            f"got version {version} with flags {flags:#04x}: this Atoll reads version {VERSION} and flag {ZSTD:#04x}; "
            "install the same version on both sides"
        )
    if size > max_bytes:
        raise WireError(f"got a payload of {size} bytes, {max_bytes} are allowed: send less, or raise the limit")
    if num_bytes != size and not (flags & ZSTD and num_bytes < size):
        raise WireError(f"{size} bytes declared, got {num_bytes}; {DAMAGED}")
    if num_sides > MAX_SIDES:
        raise WireError(f"got {num_sides} sides, at most {MAX_SIDES} are allowed: use a shorter chain of transforms")
    return flags, num_sides, size


def _read_table(message: memoryview, num_sides: int, max_bytes: int) -> tuple[list[_Row], list[list[str]], int]:
    """Return a row for each tensor, the names of each side, and the end of the table."""
    row, at = _read_row(message, HEADER.size, max_bytes)
    rows, names = [row], []
    for _ in range(num_sides):
        (num_tensors,), at = _fields("<H", message, at)
        if len(rows) + num_tensors > MAX_TENSORS:
            raise WireError(f"got more than {MAX_TENSORS} tensors: join small ones into one")
        side = []
        for _ in range(num_tensors):
            (length,), at = _fields("<B", message, at)
            (name,), at = _fields(f"{length}s", message, at)
            row, at = _read_row(message, at, max_bytes)
            side.append(name.decode("latin-1"))
            rows.append(row)
        _check_names(side)
        names.append(side)
    return rows, names, at


def _read_row(message: memoryview, at: int, max_bytes: int) -> tuple[_Row, int]:
    (code, num_dims), at = _fields("<BB", message, at)
    if code not in DTYPES or num_dims > MAX_DIMS:
        raise WireError(
            f"got a tensor of unknown dtype {code} or of more than {MAX_DIMS} dimensions ({num_dims}); {DAMAGED}"
        )
    shape, at = _fields(f"<{num_dims}Q", message, at)
    if math.prod(max(dim, 1) for dim in shape) * DTYPES[code].itemsize > max_bytes:
        raise WireError(
            f"got a tensor of {shape} {DTYPES[code]}, {max_bytes} bytes are allowed: send less, or raise the limit"
        )
    return _Row(DTYPES[code], shape), at


def _fields(layout: str, message: memoryview, at: int) -> tuple[tuple[Any, ...], int]:
    """Read a struct; return its fields and its end."""
    end = at + struct.calcsize(layout)
    if end > len(message):
        raise WireError(f"cut off: {end} bytes are needed, got {len(message)}; {DAMAGED}")
    return struct.unpack_from(layout, message, at), end


def _decompressed(body: _Source, num_bytes: int) -> Iterator[memoryview]:
    """Yield the decompressed chunks; each frame must declare exactly the expected number of bytes."""
    decompressor = zstandard.ZstdDecompressor(max_window_size=CHUNK)
    for remaining in range(num_bytes, 0, -CHUNK):
        (length,) = struct.unpack("<I", body.take(4))
        if length > MAX_FRAME:
            raise WireError(f"got a chunk of {length} compressed bytes, at most {MAX_FRAME} are allowed; {DAMAGED}")
        frame = body.take(length)
        try:
            declared = zstandard.frame_content_size(frame)
        except zstandard.ZstdError as error:
            raise WireError(f"a chunk is not zstd: {error}; {DAMAGED}") from error
        if declared != min(remaining, CHUNK):
            raise WireError(f"got a chunk of {declared} bytes, expected {min(remaining, CHUNK)}; {DAMAGED}")
        try:
            chunk = decompressor.decompress(frame, allow_extra_data=False)
        except zstandard.ZstdError as error:
            raise WireError(f"a chunk cannot be decompressed: {error}; {DAMAGED}") from error
        yield memoryview(chunk)


def _read_tensors(rows: list[_Row], chunks: Iterator[memoryview]) -> Iterator[Tensor]:
    """Copy the bytes of the chunks into tensors; too few bytes raise WireError."""
    chunk = memoryview(b"")
    for row in rows:
        bytes_N = torch.empty(row.num_bytes, dtype=torch.uint8)
        target = bytes_N.numpy().data
        while target:
            chunk = chunk or next(chunks, memoryview(b""))
            if not chunk:
                raise WireError(f"cut off: {len(target)} more bytes are needed; {DAMAGED}")
            num = min(len(target), len(chunk))
            target[:num] = chunk[:num]
            target, chunk = target[num:], chunk[num:]
        if row.dtype is torch.bool and row.num_bytes and int(bytes_N.max()) > 1:
            raise WireError(f"got a bool that is neither 0 nor 1; {DAMAGED}")
        yield bytes_N.view(row.dtype).reshape(row.shape)
