"""The CNN of McMahan et al."""

from __future__ import annotations

from torch import nn

from atoll.models.sizes import Classes, Image


def cnn_mcmahan(input_shape: Image = (1, 28, 28), num_classes: Classes = 10) -> nn.Module:
    """Build two 5x5 convolutions (32 and 64 channels, each with 2x2 max pooling), 512 ReLU units, and the output.

    1,663,370 parameters on MNIST (McMahan et al. 2017, section 3).
    """
    channels, height, width = input_shape
    return nn.Sequential(
        nn.Conv2d(channels, 32, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * (height // 4) * (width // 4), 512),
        nn.ReLU(),
        nn.Linear(512, num_classes),
    )
