"""Send the difference to the last broadcast."""

from __future__ import annotations

from torch import Tensor

from atoll.core.messages import State
from atoll.core.transform import Encoding, Transform


def delta() -> Transform:
    """Send the difference to the last broadcast; allowed only as the first step of a downlink.

    The downlink itself subtracts and adds the last broadcast, so that encode and decode change nothing here. Later
    steps then encode the difference, which is small even if the model is not.
    """

    def encode(vector_V: Tensor, memory: State, encoding: Encoding) -> tuple[Tensor, State, State]:
        return vector_V, {}, memory

    def decode(carrier_V: Tensor, side: State) -> Tensor:
        return carrier_V

    return Transform(
        encode=encode,
        decode=decode,
        linear=True,
        sensitivity=lambda l2_in: l2_in,
        against_known=True,
        unbiased=True,
        contractive=True,
    )
