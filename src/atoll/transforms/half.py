"""Send two bytes per value."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from atoll.core.messages import State
from atoll.core.transform import Encoding, Transform, needs_floats

FORMATS = {"float16": torch.float16, "bfloat16": torch.bfloat16}
EXAMPLES = [{}, {"format": "bfloat16"}]


def half(format: Literal["float16", "bfloat16"] = "float16") -> Transform:
    """Send 16-bit floats, rounded to the nearest: float16 (11 bits of precision, up to 65504) or bfloat16 (8 bits).

    Values beyond the range of the format become Inf. Rounding may double the smallest values, and so the norm.
    """
    dtype = FORMATS[format]
    max_value = torch.finfo(dtype).max

    def encode(vector_V: Tensor, memory: State, encoding: Encoding) -> tuple[Tensor, State, State]:
        needs_floats("half", vector_V)
        return vector_V.to(dtype), {"like": torch.empty(0, dtype=vector_V.dtype)}, memory

    def decode(carrier: Tensor, side: State) -> Tensor:
        return carrier.to(side["like"].dtype)

    return Transform(
        encode=encode, decode=decode, sensitivity=lambda l2_in: 2 * l2_in if l2_in <= max_value else math.inf
    )
