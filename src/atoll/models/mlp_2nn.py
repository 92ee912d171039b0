"""The 2NN of McMahan et al."""

from __future__ import annotations

import math

from torch import nn

from atoll.models.sizes import Classes, Shape, Width


def mlp_2nn(input_shape: Shape = (1, 28, 28), num_classes: Classes = 10, hidden: Width = 200) -> nn.Module:
    """Build two hidden layers of 200 ReLU units: 199,210 parameters on MNIST (McMahan et al. 2017, section 3)."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(math.prod(input_shape), hidden),
        nn.ReLU(),
        nn.Linear(hidden, hidden),
        nn.ReLU(),
        nn.Linear(hidden, num_classes),
    )
