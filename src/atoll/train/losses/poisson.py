"""Poisson loss."""

from __future__ import annotations

from torch import Tensor

from atoll.core.problem import Loss
from atoll.train.losses.shapes import alike, per_sample

FITS = ("regression",)
"""The problems that it is for."""


def poisson() -> Loss:
    """exp(z) - y z, the negative log likelihood of counts y of rate exp(z), without what the model cannot change."""

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        scores, wanted = alike(outputs, targets)
        return per_sample(scores.exp() - wanted * scores)

    return loss
