"""Focal loss."""

from __future__ import annotations

import torch
from torch import Tensor

from atoll.core.options import NotNegative
from atoll.core.problem import Loss
from atoll.train.losses.shapes import alike, per_sample

EXAMPLES = [{}, {"gamma": 0.5}]
FITS = ("classification", "binary", "multi_label")
"""The problems that it is for."""


def focal(gamma: NotNegative = 2.0) -> Loss:
    """-(1 - p)^gamma log p, p the probability of the target (Lin et al. 2017, arXiv:1708.02002, equation 4).

    Targets are classes, or zeros and ones with one output each; gamma = 0 is cross entropy.
    """

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        if targets.dtype.is_floating_point:
            scores, wanted = alike(outputs, targets)
            log_p = torch.nn.functional.logsigmoid(torch.where(wanted > 0.5, scores, -scores))
        else:
            log_p = outputs.log_softmax(-1).gather(-1, targets.unsqueeze(-1)).squeeze(-1)
        rest = (1 - log_p.exp()).clamp(min=torch.finfo(log_p.dtype).tiny)  # gamma below 1 has no slope at zero
        return per_sample(-(rest**gamma) * log_p)

    return loss
