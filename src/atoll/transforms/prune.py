"""Send the same coordinates every time. Shapes: V, the vector that comes in; K, the values of it that travel."""

from __future__ import annotations

import torch
from torch import Tensor

from atoll.core.errors import PlanError
from atoll.core.messages import State
from atoll.core.transform import Encoding, Transform
from atoll.transforms.feedback import Fraction, codec, kept_positions, largest, number_kept, positions, spread


def prune(fraction: Fraction = 0.1) -> Transform:
    """Send a client's own fixed share of coordinates: those that were largest when it was first asked.

    What is not among them is dropped for good. The positions travel every time: a server without a memory for each
    client could not decode otherwise. Bytes for float32: 4 K for the values, and V / 8 or less for the positions.
    """
    num_kept = number_kept("prune", fraction, None)

    def encode(vector_V: Tensor, memory: State, encoding: Encoding) -> tuple[Tensor, State, State]:
        num = vector_V.numel()
        mask = memory or positions(largest(vector_V, num_kept(num)), num)
        if int(mask["length"]) != num:
            raise PlanError(
                f"prune picked from {int(mask['length'])} values but gets {num}: put it earlier in uplink, before what "
                "changes their number"
            )
        return vector_V[torch.from_numpy(kept_positions(mask))], mask, mask

    return codec("prune", Transform(encode, spread, sensitivity=lambda l2_in: l2_in, contractive=True))
