"""Huber loss."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from atoll.core.options import Positive
from atoll.core.problem import Loss
from atoll.train.losses.shapes import alike, per_sample

EXAMPLES = [{}, {"delta": 0.1}]
FITS = ("regression", "binary", "multi_label")
"""The problems that it is for."""


def huber(delta: Positive = 1.0) -> Loss:
    """d^2 / 2 where the difference d is below `delta`, delta (|d| - delta / 2) beyond (Huber 1964)."""

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        scores, wanted = alike(outputs, targets)
        return per_sample(functional.huber_loss(scores, wanted, delta=delta, reduction="none"))

    return loss
