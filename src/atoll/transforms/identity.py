"""Send the vector unchanged."""

from __future__ import annotations

from torch import Tensor

from atoll.core.messages import State
from atoll.core.transform import Encoding, Transform


def identity() -> Transform:
    """Change nothing: the neutral element of `chain`."""

    def encode(vector_V: Tensor, memory: State, encoding: Encoding) -> tuple[Tensor, State, State]:
        return vector_V, {}, memory

    def decode(carrier: Tensor, side: State) -> Tensor:
        return carrier

    return Transform(
        encode=encode, decode=decode, linear=True, sensitivity=lambda l2_in: l2_in, unbiased=True, contractive=True
    )
