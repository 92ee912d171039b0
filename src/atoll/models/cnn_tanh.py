"""A small CNN with bounded activations, for noisy gradients."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from atoll.models.sizes import Classes, Image


class Patches(nn.Module):
    """Square patches of images, channels last: (B, C, H, W) -> (B, rows, columns, C * size * size).

    A linear layer on patches is a convolution. With few channels it is several times as fast on a CPU, and so are the
    following layers, because the channels of a position are contiguous.
    """

    def __init__(self, size: int, stride: int, padding: int) -> None:
        super().__init__()
        self.size, self.stride, self.padding = size, stride, padding

    def forward(self, x: Tensor) -> Tensor:
        """Return the patches of the padded images."""
        padded = functional.pad(x, (self.padding,) * 4)
        windows = padded.unfold(-2, self.size, self.stride).unfold(-2, self.size, self.stride)
        return windows.movedim(-5, -3).flatten(-3)


class ChannelsSecond(nn.Module):
    """A view with the channels in second place, for convolutions: (B, rows, columns, C) -> (B, C, rows, columns)."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the view."""
        return x.movedim(-1, -3)


def cnn_tanh(input_shape: Image = (1, 28, 28), num_classes: Classes = 10) -> nn.Module:
    """Build convolutions of 16 (8x8) and 32 (4x4) channels, of stride 2, each max-pooled by 2 at stride 1; 32 units.

    26,010 parameters on MNIST. Tanh bounds the gradients, so that clipping changes them less (Papernot et al. 2021,
    arXiv:2007.14191, table 1).
    """
    channels, height, width = input_shape
    rows, columns = (((length - 2) // 2 - 4) // 2 for length in (height, width))
    return nn.Sequential(
        Patches(8, stride=2, padding=3),
        nn.Linear(64 * channels, 16),
        nn.Tanh(),
        ChannelsSecond(),
        nn.MaxPool2d(2, stride=1),
        nn.Conv2d(16, 32, 4, stride=2),
        nn.Tanh(),
        nn.MaxPool2d(2, stride=1),
        nn.Flatten(),
        nn.Linear(32 * rows * columns, 32),
        nn.Tanh(),
        nn.Linear(32, num_classes),
    )
