"""Multinomial logistic regression."""

from __future__ import annotations

import math

from torch import nn


def logistic(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """One linear layer on the flattened features: the convex model of the FedProx paper (arXiv:1812.06127)."""
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(input_shape), num_classes))
