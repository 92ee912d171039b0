"""Send the same coordinates in every round. Shapes: V, the input vector; K, the values of it that are sent."""

from __future__ import annotations

import torch
from torch import Tensor

from atoll.core.errors import PlanError
from atoll.core.messages import State
from atoll.core.transform import Encoding, Transform
from atoll.transforms.feedback import (
    Fraction,
    codec,
    largest_positions,
    number_kept,
    pack_positions,
    scatter,
    unpack_positions,
)


def prune(fraction: Fraction = 0.1) -> Transform:
    """Send a fixed share of coordinates for each client: those that were largest in its first update.

    All other coordinates are dropped for good. The positions are sent in every round, because the server keeps no
    memory for each client. Bytes for float32: 4 K for the values, and V / 8 or less for the positions.
    """
    num_kept = number_kept("prune", fraction, None)

    def encode(vector_V: Tensor, memory: State, encoding: Encoding) -> tuple[Tensor, State, State]:
        num = vector_V.numel()
        mask = memory or pack_positions(largest_positions(vector_V, num_kept(num)), num)
        if int(mask["length"]) != num:
            raise PlanError(
                f"prune selected from {int(mask['length'])} values but got {num}: put it earlier in uplink, before "
                "steps that change their number"
            )
        return vector_V[torch.from_numpy(unpack_positions(mask))], mask, mask

    return codec("prune", Transform(encode=encode, decode=scatter, sensitivity=lambda l2_in: l2_in, contractive=True))
