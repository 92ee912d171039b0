"""Detection: how much the server trusts each client, from what it sends. Shapes: C clients, D parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from atoll.core.options import Range

BLOCK = 1 << 13
"""Columns that are looked at together: few enough for the cache, in float64 too."""


Threshold = Annotated[float, Range(0, 1, open_low=True, open_high=True, hint="trust starts at 1 and never exceeds it")]
Decay = Annotated[float, Range(0, 1, open_high=True, hint="0 looks at the last round only")]


class Seen(NamedTuple):
    """Where each update lies beside the aggregate, (C,) in float64."""

    distance_C: Tensor
    cosine_C: Tensor
    """0 where either is 0."""

    @classmethod
    def of(cls, updates_CD: Tensor, aggregate_D: Tensor) -> Seen:
        """Look at every update."""
        squares_C3 = updates_CD.new_zeros(len(updates_CD), 3, dtype=torch.float64)
        for start in range(0, len(aggregate_D), BLOCK):
            columns = slice(start, start + BLOCK)
            wide_CB, wide_B = updates_CD[:, columns].double(), aggregate_D[columns].double()
            squares_C3[:, 0] += wide_CB.square().sum(1)
            squares_C3[:, 1] += wide_CB @ wide_B
            squares_C3[:, 2] += wide_CB.sub_(wide_B).square_().sum(1)
        length_C = squares_C3[:, 0].sqrt() * aggregate_D.double().norm()
        return cls(squares_C3[:, 2].sqrt(), squares_C3[:, 1] / length_C.clamp_min(1e-300))


class Sight(NamedTuple):
    """What a detector may look at after a round: the updates, where they lie beside the aggregate, and a loss."""

    updates_CD: Tensor
    seen: Seen
    loss: Callable[[Tensor | None], float]
    """An update -> the loss on the server's own samples of the model moved by it; None is the model as it was."""


class Detector(NamedTuple):
    """How a round's trust in each client is found, and what becomes of it over the rounds.

    Trust starts at 1 and becomes `decay` times what it was plus 1 - `decay` times that of the round. A client whose
    trust falls below `threshold` is quarantined: its update does not count, and it is not asked again.
    """

    trust: Callable[[Sight], Tensor]
    """A round -> trust in each of its clients, (C,) in [0, 1]."""
    threshold: float
    decay: float
    needs_loss: bool = False
    """Whether it needs samples of the server's own."""
