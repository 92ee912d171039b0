"""Bound the norm of an update."""

from __future__ import annotations

from typing import Annotated

from torch import Tensor

from atoll.core.messages import State
from atoll.core.options import above
from atoll.core.transform import Encoding, Transform, needs_floats

EXAMPLE = {"norm": 1.0}


def clip(norm: Annotated[float, above(0, "to send nothing at all, leave the client out")]) -> Transform:
    """Scale the vector down to an L2 norm of at most `norm`: v * min(1, norm / |v|)."""

    def encode(vector_V: Tensor, memory: State, encoding: Encoding) -> tuple[Tensor, State, State]:
        needs_floats("clip", vector_V)
        input_norm = float(vector_V.double().norm())
        return vector_V * (norm / input_norm) if input_norm > norm else vector_V, {}, memory

    def decode(carrier: Tensor, side: State) -> Tensor:
        return carrier

    return Transform(
        encode=encode, decode=decode, linear=True, sensitivity=lambda l2_in: min(l2_in, norm), contractive=True
    )
