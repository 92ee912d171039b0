"""Numbers on a grid and their packing into bytes, for the quantisers.

Shapes: V values, P packed bytes. A grid has the points low + (code - shift) * step for the codes 0 ... num_codes - 1.
Bytes and bits are in little-endian order.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from atoll.core.errors import DataError

CHUNK = 65536
"""Number of values converted at once, so that intermediate results stay in the cache."""


class Grid(NamedTuple):
    """Evenly spaced points; a step that is not finite marks a range with NaN or Inf."""

    low: float
    step: float
    num_codes: int
    shift: int = 0


def code_dtype(bits: int) -> torch.dtype:
    """Return the smallest supported type that holds codes of `bits` bits."""
    return torch.uint8 if bits <= 8 else torch.int32


def to_codes(values_V: Tensor, grid: Grid, codes_V: Tensor, rng: np.random.Generator | None) -> None:
    """Write the code of each value to `codes_V`: rounded at random without bias, or to the nearest if rng is None.

    The value y = (v - low) / step + shift becomes floor(y + u). The uniform u has 16 bits, so that the mean is exact to
    2^-16 of a step.
    """
    if not math.isfinite(grid.step):
        codes_V.zero_()
        return
    dtype = torch.float32 if values_V.dtype == torch.float32 and grid.num_codes <= 256 else torch.float64
    step = grid.step or 1.0  # a step of 0 means that every value is `low`
    for chunk_V, out_V in zip(torch.split(values_V, CHUNK), torch.split(codes_V, CHUNK), strict=True):
        y_V = chunk_V.to(dtype).sub(grid.low).div_(step).clamp_(-grid.shift, grid.num_codes - 1 - grid.shift)
        y_V.add_(grid.shift + 0.5)
        if rng is not None:
            words = rng.integers(2**64 - 1, size=-(-len(chunk_V) // 4), dtype=np.uint64, endpoint=True)
            y_V.add_(torch.from_numpy(words.view(np.int16))[: len(chunk_V)], alpha=2.0**-16)  # u - 1/2
        out_V.copy_(y_V)  # truncation is floor, because y is not negative


def to_values(codes_V: Tensor, grid: Grid, values_V: Tensor) -> None:
    """Write the grid point of each code to `values_V`."""
    for chunk_V, out_V in zip(torch.split(codes_V, CHUNK), torch.split(values_V, CHUNK), strict=True):
        out_V.copy_(chunk_V)
        if grid.shift:
            out_V.sub_(grid.shift)
        out_V.mul_(grid.step).add_(grid.low)


def num_packed(num: int, bits: int) -> int:
    """Return the number of bytes of `num` packed codes: ceil(num * bits / 8)."""
    return -(-num * bits // 8)


def pack_bits(codes_V: Tensor, bits: int) -> Tensor:
    """Pack codes below 2^bits (1 to 16 bits) tightly into bytes; above 8 bits the low bytes come first.

    >>> pack_bits(torch.tensor([1, 2, 3], dtype=torch.uint8), 4).tolist()
    [33, 3]
    """
    if bits > 8:
        return torch.cat([codes_V.to(torch.uint8), pack_bits((codes_V >> 8).to(torch.uint8), bits - 8)])
    if bits == 8:
        return codes_V
    words = torch.zeros(-(-len(codes_V) // 8), dtype=torch.int64)
    words.view(torch.uint8)[: len(codes_V)] = codes_V
    for half, width in ((8, bits), (16, 2 * bits), (32, 4 * bits)):  # two neighbours move together
        low = _fields(half, width)
        words = (words & low) | ((words >> (half - width)) & (low << width))
    return words.view(torch.uint8).view(-1, 8)[:, :bits].reshape(-1)[: num_packed(len(codes_V), bits)]


def unpack_bits(packed_P: Tensor, bits: int, num: int) -> Tensor:
    """Return the codes that `pack_bits` packed, as uint8 up to 8 bits and as int32 above.

    >>> unpack_bits(torch.tensor([33, 3], dtype=torch.uint8), 4, 3).tolist()
    [1, 2, 3]
    """
    if packed_P.dtype != torch.uint8 or len(packed_P) != num_packed(num, bits):
        raise DataError(
            f"{num} codes of {bits} bits fill {num_packed(num, bits)} bytes: got {len(packed_P)} values of "
            f"{packed_P.dtype}; encode and decode with the same options"
        )
    if bits > 8:
        high_V = unpack_bits(packed_P[num:], bits - 8, num)
        return packed_P[:num].int() | (high_V.int() << 8)
    if bits == 8:
        return packed_P
    padded = torch.zeros(-(-num // 8) * bits, dtype=torch.uint8)
    padded[: len(packed_P)] = packed_P
    bytes_W8 = torch.zeros(-(-num // 8), 8, dtype=torch.uint8)
    bytes_W8[:, :bits] = padded.view(-1, bits)
    words = bytes_W8.view(-1).view(torch.int64)
    for half, width in ((32, 4 * bits), (16, 2 * bits), (8, bits)):  # two neighbours move apart
        low = _fields(half, width)
        words = (words & low) | ((words & (low << width)) << (half - width))
    return words.view(torch.uint8)[:num]


def _fields(half: int, width: int) -> int:
    """Return a mask of the low `width` bits of every second field of `half` bits in a word of 64 bits."""
    return sum(((1 << width) - 1) << start for start in range(0, 64, 2 * half))
