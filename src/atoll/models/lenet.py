"""The LeNet with 20 and 50 channels."""

from __future__ import annotations

from typing import Literal

from torch import nn

from atoll.models.sizes import Classes, Image

GROUPS = 10
"""Groups of channels that a group norm scales together."""


def lenet(
    input_shape: Image = (1, 28, 28), num_classes: Classes = 10, norm: Literal["batch", "group"] | None = None
) -> nn.Module:
    """Build two 5x5 convolutions without padding (20, 50 channels, 2x2 max pooling), 500 ReLU units, the output.

    431,080 parameters on MNIST: LeNet-5 (LeCun et al. 1998, Proceedings of the IEEE 86) in the version of Caffe and of
    benchmarks of Byzantine learning (ByzFL, arXiv:2505.24802). `norm` puts a batch norm or a group norm behind each
    convolution and behind the hidden layer.
    """
    channels, height, width = input_shape
    pixels = (((height - 4) // 2 - 4) // 2) * (((width - 4) // 2 - 4) // 2)

    def normed(layer: nn.Module, num: int, batch_norm: type[nn.Module]) -> list[nn.Module]:
        if norm is None:
            return [layer]
        return [layer, batch_norm(num) if norm == "batch" else nn.GroupNorm(GROUPS, num)]

    return nn.Sequential(
        *normed(nn.Conv2d(channels, 20, 5), 20, nn.BatchNorm2d),
        nn.MaxPool2d(2),
        nn.ReLU(),  # after pooling: the same result for a quarter of the work
        *normed(nn.Conv2d(20, 50, 5), 50, nn.BatchNorm2d),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Flatten(),
        *normed(nn.Linear(50 * pixels, 500), 500, nn.BatchNorm1d),
        nn.ReLU(),
        nn.Linear(500, num_classes),
    )
