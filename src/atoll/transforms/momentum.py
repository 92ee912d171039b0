"""Send a running mean of the updates. Shapes: V, the input vector."""

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
    """Send the running mean m <- beta m + (1 - beta) v, which starts at 0, instead of the update v.

    (Karimireddy et al. 2021, arXiv:2012.10333, algorithm 1: worker momentum lowers the variance of honest clients, so
    that robust rules find bad ones more easily.) A bound on the norm of all updates also bounds m.
    """

    def init(num_values: int) -> State:
        return {"mean": torch.zeros(num_values)}

    def encode(vector_V: Tensor, memory: State, encoding: Encoding) -> tuple[Tensor, State, State]:
        needs_floats("momentum", vector_V)
        if memory["mean"].shape != vector_V.shape:
            raise PlanError(
                f"momentum has a mean of {memory['mean'].numel()} values but got {vector_V.numel()}: "
                "put it earlier in uplink, before steps that change their number"
            )
        mean_V = beta * memory["mean"].to(vector_V.dtype) + (1 - beta) * vector_V
        return mean_V, {}, {"mean": mean_V}

    def decode(carrier: Tensor, side: State) -> Tensor:
        return carrier

    return Transform(encode=encode, decode=decode, init=init, linear=True, sensitivity=lambda l2_in: l2_in)
