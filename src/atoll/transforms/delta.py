"""Send what is new."""

from __future__ import annotations

from torch import Tensor

from atoll.core.messages import State
from atoll.core.transform import Encoding, Transform


def delta() -> Transform:
    """Send the difference to what the receiver knows; the first step of a downlink.

    The downlink subtracts and adds what is known, so that nothing is left to do here; later steps encode a difference,
    which is small where the model is not.
    """

    def encode(vector_V: Tensor, memory: State, encoding: Encoding) -> tuple[Tensor, State, State]:
        return vector_V, {}, memory

    def decode(carrier_V: Tensor, side: State) -> Tensor:
        return carrier_V

    return Transform(
        encode,
        decode,
        linear=True,
        sensitivity=lambda l2_in: l2_in,
        against_known=True,
        unbiased=True,
        contractive=True,
    )
