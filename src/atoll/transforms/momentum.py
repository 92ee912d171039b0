"""Send a running mean of the updates. Shapes: V, the vector that comes in."""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor

from atoll.core.errors import PlanError
from atoll.core.messages import State
from atoll.core.options import Range
from atoll.core.transform import Encoding, Transform, needs_floats


def momentum(
    beta: Annotated[float, Range(0, 1, open_high=True, hint="0 sends every update as it is")] = 0.9,
) -> Transform:
    """Remember m <- beta m + (1 - beta) v, beginning with 0, and send m instead of the update v.

    (Karimireddy et al. 2021, arXiv:2012.10333, algorithm 1: worker momentum makes honest clients spread less, so that
    bad ones that hide among them from round to round stick out.) If no update is longer than some bound, no m is.
    """

    def init(num_values: int) -> State:
        return {"mean": torch.zeros(num_values)}

    def encode(vector_V: Tensor, memory: State, encoding: Encoding) -> tuple[Tensor, State, State]:
        needs_floats("momentum", vector_V)
        if memory["mean"].shape != vector_V.shape:
            raise PlanError(
                f"momentum remembers {memory['mean'].numel()} values but gets {vector_V.numel()}: "
                "put it earlier in uplink, before what changes their number"
            )
        mean_V = beta * memory["mean"].to(vector_V.dtype) + (1 - beta) * vector_V
        return mean_V, {}, {"mean": mean_V}

    def decode(carrier: Tensor, side: State) -> Tensor:
        return carrier

    return Transform(encode, decode, init=init, linear=True, sensitivity=lambda l2_in: l2_in)
