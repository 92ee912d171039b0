"""Detection: how much the server trusts each client, from what it sends. Shapes: C clients, D parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from atoll.core.errors import PlanError


class Sight(NamedTuple):
    """What a detector may look at after a round: the updates, what the rule made of them, and a loss."""

    updates_CD: Tensor
    aggregate_D: Tensor
    loss: Callable[[Tensor | None], float]
    """An update -> the loss on the server's own samples of the model moved by it; None is the model as it was."""

    def distances(self) -> Tensor:
        """How far each update is from the aggregate, (C,) in float64."""
        far_C: Tensor = (self.updates_CD.double() - self.aggregate_D.double()).norm(dim=1)
        return far_C

    def cosines(self) -> Tensor:
        """The cosine of each update with the aggregate, (C,) in float64; 0 where either is 0."""
        rows_CD, one_D = self.updates_CD.double(), self.aggregate_D.double()
        lengths_C: Tensor = rows_CD.norm(dim=1) * one_D.norm()
        return (rows_CD @ one_D) / lengths_C.clamp_min(1e-300)


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


def checked_trust(name: str, threshold: float, decay: float) -> tuple[float, float]:
    """Refuse a threshold or a decay that cannot work."""
    if not 0 < threshold < 1:
        raise PlanError(f"{name}.threshold must be in (0, 1), got {threshold}: trust starts at 1 and never exceeds it")
    if not 0 <= decay < 1:
        raise PlanError(f"{name}.decay must be in [0, 1), got {decay}; 0 looks at the last round only")
    return threshold, decay
