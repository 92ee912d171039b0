"""Multinomial logistic regression."""

from __future__ import annotations

import math

from torch import nn

from atoll.models.sizes import Classes, Shape


def logistic(input_shape: Shape, num_classes: Classes) -> nn.Module:
    """Build one linear layer on the flattened features: the convex model of the FedProx paper (arXiv:1812.06127)."""
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(input_shape), num_classes))
