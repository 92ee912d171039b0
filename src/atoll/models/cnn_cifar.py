"""A small CNN for CIFAR-10."""

from __future__ import annotations

from torch import nn

from atoll.core.options import ShareBelowOne
from atoll.models.sizes import Classes, Image


def cnn_cifar(input_shape: Image = (3, 32, 32), num_classes: Classes = 10, dropout: ShareBelowOne = 0.0) -> nn.Module:
    """Build 3x3 convolutions of 32 and 64 channels without padding, 2x2 max pooling, 128 ReLU units, the output.

    1,626,442 parameters on CIFAR-10; `dropout` applies before and after the hidden layer (Reddi et al. 2021,
    arXiv:2003.00295, appendix C, use this shape on EMNIST).
    """
    channels, height, width = input_shape
    layers: list[nn.Module] = [
        nn.Conv2d(channels, 32, 3),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Dropout(dropout),
        nn.Flatten(),
        nn.Linear(64 * ((height - 4) // 2) * ((width - 4) // 2), 128),
        nn.ReLU(),
        nn.Dropout(dropout),
        nn.Linear(128, num_classes),
    ]
    return nn.Sequential(*(layer for layer in layers if dropout or not isinstance(layer, nn.Dropout)))
