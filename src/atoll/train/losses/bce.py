"""Binary cross entropy."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from atoll.core.options import Positive
from atoll.core.problem import Loss
from atoll.train.losses.shapes import alike, per_sample

EXAMPLES = [{}, {"positive_weight": 3.0}]
FITS = ("binary", "multi_label")
"""The problems that it is for."""


def bce(positive_weight: Positive = 1.0) -> Loss:
    """-y log sigmoid(z) - (1 - y) log(1 - sigmoid(z)) of each sample, the mean over labels where there are several.

    A target of 1 weighs `positive_weight` times as much.
    """

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        scores, wanted = alike(outputs, targets)
        weight = scores.new_tensor(positive_weight) if positive_weight != 1 else None
        found = functional.binary_cross_entropy_with_logits(scores, wanted, pos_weight=weight, reduction="none")
        return per_sample(found)

    return loss
