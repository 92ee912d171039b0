"""A small CNN with bounded activations, for noisy gradients."""

from __future__ import annotations

from torch import nn


def cnn_tanh(input_shape: tuple[int, ...] = (1, 28, 28), num_classes: int = 10) -> nn.Module:
    """Convolutions of 16 (8x8) and 32 (4x4) channels, each of stride 2 and max-pooled by 2 at stride 1, and 32 units.

    26,010 parameters on MNIST. Tanh keeps gradients short, so that clips take less away (Papernot et al. 2021,
    arXiv:2007.14191, table 1).
    """
    channels, height, width = input_shape
    rows, columns = (((length - 2) // 2 - 4) // 2 for length in (height, width))
    return nn.Sequential(
        nn.Conv2d(channels, 16, 8, stride=2, padding=3),
        nn.Tanh(),
        nn.MaxPool2d(2, stride=1),
        nn.Conv2d(16, 32, 4, stride=2),
        nn.Tanh(),
        nn.MaxPool2d(2, stride=1),
        nn.Flatten(),
        nn.Linear(32 * rows * columns, 32),
        nn.Tanh(),
        nn.Linear(32, num_classes),
    )
