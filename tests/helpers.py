"""Models that tests share."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class Normed(nn.Module):
    """A model with batch norm, dropout of two kinds, and a convolution."""

    def __init__(self, input_shape: tuple[int, ...], num_classes: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(input_shape[0], 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.drop = nn.Dropout2d(0.2)
        self.out = nn.Linear(4 * input_shape[1] * input_shape[2], num_classes)

    def forward(self, x: Any) -> Any:
        return self.out(self.drop(torch.relu(self.norm(self.conv(x)))).flatten(1))


def normed(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    return Normed(input_shape, num_classes)


def dropped(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    features = input_shape[0] * input_shape[1] * input_shape[2]
    return nn.Sequential(nn.Flatten(), nn.Linear(features, 20), nn.ReLU(), nn.Dropout(0.4), nn.Linear(20, num_classes))
