"""QSGD: random rounding to levels of the norm. Shapes: V values."""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor

from atoll.core.messages import State
from atoll.core.options import Range
from atoll.core.transform import Encoding, Transform, needs_floats
from atoll.transforms.bits import Grid, code_dtype, pack_bits, to_codes, to_values, unpack_bits


def qsgd(levels: Annotated[int, Range(1, 2**15 - 1, hint="for more, leave it out")] = 127) -> Transform:
    """Send |v| and, for each value, its sign and a random level: |v| sgn(v_i) xi_i.

    (Alistarh et al. 2017, arXiv:1610.02132, section 3.1.) With s levels and l/s <= |v_i| / |v| <= (l+1)/s,
    xi_i is one of these two bounds, and unbiased. Sign and level are one code of a fixed width, 1 + the bits of s,
    instead of the paper's Elias code. The norm is not bounded: it may grow as the square root of the number of values.
    """
    bits = 1 + levels.bit_length()

    def grid(norm: float) -> Grid:
        return Grid(0.0, norm / levels, 2 * levels + 1, shift=levels)

    def encode(vector_V: Tensor, memory: State, encoding: Encoding) -> tuple[Tensor, State, State]:
        needs_floats("qsgd", vector_V)
        norm = torch.linalg.vector_norm(vector_V, dtype=torch.float64).to(vector_V.dtype)
        codes_V = torch.empty(len(vector_V), dtype=code_dtype(bits))
        to_codes(vector_V, grid(float(norm)), codes_V, encoding.rng)
        return pack_bits(codes_V, bits), {"norm": norm, "length": torch.tensor(len(vector_V))}, memory

    def decode(carrier: Tensor, side: State) -> Tensor:
        codes_V = unpack_bits(carrier, bits, int(side["length"]))
        vector_V = torch.empty(len(codes_V), dtype=side["norm"].dtype)
        to_values(codes_V, grid(float(side["norm"])), vector_V)
        return vector_V

    return Transform(encode=encode, decode=decode, unbiased=True)
