"""Uniform quantisation between the smallest and the largest value.

Shapes: V values, S segments, each with its own range.
"""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from torch import Tensor

from atoll.core.messages import State
from atoll.core.options import Range
from atoll.core.params import ParamSpec
from atoll.core.transform import Encoding, Transform, needs_floats
from atoll.transforms.bits import Grid, code_dtype, pack_bits, to_codes, to_values, unpack_bits

EXAMPLES = [{}, {"bits": 2}, {"bits": 1}, {"bits": 12}]


def quantise(
    bits: Annotated[int, Range(1, 16, hint="for more, leave it out")] = 8,
    rounding: Literal["stochastic", "nearest"] = "stochastic",
    per: Literal["tensor", "whole"] = "tensor",
) -> Transform:
    """Send b bits per value: low + code * step with step = (high - low) / (2^b - 1).

    (Suresh et al. 2017, arXiv:1611.00429, section 2.2.) Stochastic rounding is unbiased; its mean squared error per
    value is at most step^2 / 4, and step^2 / 6 for values spread evenly between two points. There is one range for each
    parameter tensor and one for all values after the parameters, or one for the whole vector. A range that contains NaN
    or Inf is decoded as NaN. The norm is not bounded: (1, -1, 0, 0, ...) may become all ±1.
    """

    def encode(vector_V: Tensor, memory: State, encoding: Encoding) -> tuple[Tensor, State, State]:
        needs_floats("quantise", vector_V)
        sizes = segment_sizes(len(vector_V), encoding.spec) if per == "tensor" else [len(vector_V)]
        sizes = [size for size in sizes if size > 0]
        codes_V = torch.empty(len(vector_V), dtype=code_dtype(bits))
        range_S2 = torch.empty(len(sizes), 2, dtype=vector_V.dtype)
        rng = encoding.rng if rounding == "stochastic" else None
        for range_2, segment_V, out_V in zip(
            range_S2, torch.split(vector_V, sizes), torch.split(codes_V, sizes), strict=True
        ):
            low, high = segment_V.aminmax()
            range_2[0], range_2[1] = low, (high - low) / (2**bits - 1)
            to_codes(segment_V, Grid(float(low), float(range_2[1]), 2**bits), out_V, rng)
        return pack_bits(codes_V, bits), {"range": range_S2, "sizes": torch.tensor(sizes, dtype=torch.int64)}, memory

    def decode(carrier: Tensor, side: State) -> Tensor:
        sizes: list[int] = side["sizes"].tolist()
        codes_V = unpack_bits(carrier, bits, sum(sizes))
        vector_V = torch.empty(len(codes_V), dtype=side["range"].dtype)
        segments = zip(side["range"].tolist(), torch.split(codes_V, sizes), torch.split(vector_V, sizes), strict=True)
        for (low, step), segment_V, out_V in segments:
            to_values(segment_V, Grid(low, step, 2**bits), out_V)
        return vector_V

    return Transform(encode=encode, decode=decode, unbiased=rounding == "stochastic")


def segment_sizes(num_values: int, spec: ParamSpec) -> list[int]:
    """Return the sizes of the parameter tensors and of the values after them, or one size if parameters are missing."""
    if num_values < spec.num_params:
        return [num_values]
    return [*(slot.size for slot in spec.slots), num_values - spec.num_params]
