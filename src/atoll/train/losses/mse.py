"""Mean squared error."""

from __future__ import annotations

from torch import Tensor

from atoll.core.problem import Loss
from atoll.train.losses.shapes import alike, per_sample

FITS = ("regression", "binary", "multi_label")
"""The problems that it is for."""


def mse() -> Loss:
    """Squared difference of each sample, the mean over targets where there are several."""

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        scores, wanted = alike(outputs, targets)
        return per_sample((scores - wanted).square())

    return loss
