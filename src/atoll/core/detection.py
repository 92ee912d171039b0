"""Detection: the server's trust in each client, by its updates. Shapes: C clients, D parameters, B columns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from atoll.core.options import Range

BLOCK = 1 << 13
"""Number of columns compared at once: small enough for the cache in float64."""


Threshold = Annotated[float, Range(0, 1, open_low=True, open_high=True, hint="trust starts at 1 and never exceeds it")]
"""Trust below which a client is quarantined, in (0, 1)."""
Decay = Annotated[float, Range(0, 1, open_high=True, hint="0 looks at the last round only")]
"""Weight of earlier rounds in the running mean of trust, in [0, 1)."""


class Comparison(NamedTuple):
    """Distance and cosine of each update to the aggregate, (C,) in float64."""

    distance_C: Tensor
    cosine_C: Tensor
    """0 if the update or the aggregate is 0."""

    @classmethod
    def of(cls, updates_CD: Tensor, aggregate_D: Tensor) -> Comparison:
        """Compare every update with the aggregate."""
        sums_C3 = updates_CD.new_zeros(len(updates_CD), 3, dtype=torch.float64)
        for start in range(0, len(aggregate_D), BLOCK):
            columns = slice(start, start + BLOCK)
            block_CB, aggregate_B = updates_CD[:, columns].double(), aggregate_D[columns].double()
            sums_C3[:, 0] += block_CB.square().sum(1)
            sums_C3[:, 1] += block_CB @ aggregate_B
            sums_C3[:, 2] += block_CB.sub_(aggregate_B).square_().sum(1)
        norms_C = sums_C3[:, 0].sqrt() * aggregate_D.double().norm()
        return cls(sums_C3[:, 2].sqrt(), sums_C3[:, 1] / norms_C.clamp_min(1e-300))


class RoundView(NamedTuple):
    """The data of one round that a detector may use."""

    updates_CD: Tensor
    comparison: Comparison
    loss: Callable[[Tensor | None], float]
    """(update) -> loss on the server's own samples after the model moved by it; None: the loss before the round."""


class Detector(NamedTuple):
    """A measure of trust in each client of a round, and its running mean over rounds.

    t <- decay t + (1 - decay) t_round, from t = 1. A client whose trust falls below `threshold` is quarantined: its
    update does not count, and it gets no more tasks.
    """

    trust: Callable[[RoundView], Tensor]
    """(round) -> trust in each of its clients, (C,) in [0, 1]."""
    threshold: float
    decay: float
    needs_loss: bool = False
    """Whether it calls `loss`, which needs server.samples."""
