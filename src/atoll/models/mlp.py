"""Hidden layers of ReLU units, of any number and width."""

from __future__ import annotations

import math
from itertools import pairwise

from torch import nn

from atoll.models.sizes import Classes, Shape, Width


def mlp(input_shape: Shape, num_classes: Classes, widths: tuple[Width, ...] = (32,)) -> nn.Module:
    """Build a hidden layer of ReLU units for each of the widths; without any it is a linear model."""
    sizes = [math.prod(input_shape), *widths]
    layers: list[nn.Module] = [nn.Flatten()]
    for size, width in pairwise(sizes):
        layers += [nn.Linear(size, width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(sizes[-1], num_classes))
