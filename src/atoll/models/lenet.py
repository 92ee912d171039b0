"""The LeNet with 20 and 50 channels."""

from __future__ import annotations

from torch import nn

from atoll.models.sizes import Classes, Image


def lenet(input_shape: Image = (1, 28, 28), num_classes: Classes = 10) -> nn.Module:
    """Build two 5x5 convolutions without padding (20, 50 channels, 2x2 max pooling), 500 ReLU units, the output.

    431,080 parameters on MNIST: LeNet-5 (LeCun et al. 1998, Proceedings of the IEEE 86) in the version of Caffe and of
    benchmarks of Byzantine learning (ByzFL, arXiv:2505.24802).
    """
    channels, height, width = input_shape
    return nn.Sequential(
        nn.Conv2d(channels, 20, 5),
        nn.MaxPool2d(2),
        nn.ReLU(),  # after pooling: the same result for a quarter of the work
        nn.Conv2d(20, 50, 5),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(50 * (((height - 4) // 2 - 4) // 2) * (((width - 4) // 2 - 4) // 2), 500),
        nn.ReLU(),
        nn.Linear(500, num_classes),
    )
