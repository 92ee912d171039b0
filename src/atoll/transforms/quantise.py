"""Uniform quantisation between the smallest and the largest value.

Shapes: V values, S segments with a range of their own.
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
    """Send b bits a value: low + code * step with step = (high - low) / (2^b - 1).

    (Suresh et al. 2017, arXiv:1611.00429, section 2.2.) Stochastic rounding is unbiased; its mean squared error is
    step^2 / 4 a value at most, and step^2 / 6 if values lie evenly between two points. The range is that of each
    parameter tensor (what lies behind the parameters is one more), or of the whole vector. A range with NaN or Inf in
    it comes out as NaN. No norm is promised: (1, -1, 0, 0, ...) may become all ±1.
    """

    def encode(vector_V: Tensor, memory: State, encoding: Encoding) -> tuple[Tensor, State, State]:
        needs_floats("quantise", vector_V)
        sizes = segments(len(vector_V), encoding.spec) if per == "tensor" else [len(vector_V)]
        sizes = [size for size in sizes if size > 0]
        codes_V = torch.empty(len(vector_V), dtype=code_dtype(bits))
        range_S2 = torch.empty(len(sizes), 2, dtype=vector_V.dtype)
        rng = encoding.rng if rounding == "stochastic" else None
        for range_2, some_V, out_V in zip(
            range_S2, torch.split(vector_V, sizes), torch.split(codes_V, sizes), strict=True
        ):
            low, high = some_V.aminmax()
            range_2[0], range_2[1] = low, (high - low) / (2**bits - 1)
            to_codes(some_V, Grid(float(low), float(range_2[1]), 2**bits), out_V, rng)
        return pack_bits(codes_V, bits), {"range": range_S2, "sizes": torch.tensor(sizes, dtype=torch.int64)}, memory

    def decode(carrier: Tensor, side: State) -> Tensor:
        sizes: list[int] = side["sizes"].tolist()
        codes_V = unpack_bits(carrier, bits, sum(sizes))
        vector_V = torch.empty(len(codes_V), dtype=side["range"].dtype)
        pieces = zip(side["range"].tolist(), torch.split(codes_V, sizes), torch.split(vector_V, sizes), strict=True)
        for (low, step), some_V, out_V in pieces:
            to_values(some_V, Grid(low, step, 2**bits), out_V)
        return vector_V

    return Transform(encode, decode, unbiased=rounding == "stochastic")


def segments(num_values: int, spec: ParamSpec) -> list[int]:
    """The sizes of the parameter tensors and of what lies behind them; one size if the parameters are not all there."""
    if num_values < spec.num_params:
        return [num_values]
    return [*(slot.size for slot in spec.slots), num_values - spec.num_params]
