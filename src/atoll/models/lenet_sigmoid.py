"""The smooth LeNet of attacks on gradients."""

from __future__ import annotations

import math

from torch import nn

from atoll.core.options import Count
from atoll.models.sizes import Classes, Image

SPREAD = 0.5
"""First weights and biases are uniform between minus and plus this."""


def lenet_sigmoid(input_shape: Image = (3, 32, 32), num_classes: Classes = 10, stride: Count = 2) -> nn.Module:
    """Build three 5x5 convolutions of 12 channels with sigmoids, the first two of this stride, and the output.

    15,826 parameters on CIFAR-10. Twice differentiable and started wide, it is the model on which gradients give
    images away (Zhu et al. 2019, arXiv:1906.08935, section 4.1): for red teams, not for accuracy. Larger images
    take stride 1: with 2 the gradient of an image of 64x64 has fewer entries that tell of it than the image has pixels.
    """
    channels, height, width = input_shape
    rows, columns = (math.ceil(math.ceil(length / stride) / stride) for length in (height, width))
    model = nn.Sequential(
        nn.Conv2d(channels, 12, 5, stride=stride, padding=2),
        nn.Sigmoid(),
        nn.Conv2d(12, 12, 5, stride=stride, padding=2),
        nn.Sigmoid(),
        nn.Conv2d(12, 12, 5, padding=2),
        nn.Sigmoid(),
        nn.Flatten(),
        nn.Linear(12 * rows * columns, num_classes),
    )
    for tensor in model.parameters():
        nn.init.uniform_(tensor, -SPREAD, SPREAD)
    return model
