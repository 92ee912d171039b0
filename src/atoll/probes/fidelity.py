"""How near what was guessed of samples comes to them."""

from __future__ import annotations

import torch
from torch import Tensor

SAME = 200.0
"""The PSNR at which two images count as equal, in dB; it bounds what would be infinite."""


def psnr(guess: Tensor, true: Tensor, span: float) -> Tensor:
    """Return 10 log10(span^2 / mean squared error) of each pair, in dB, over all but the first dimension.

    >>> psnr(torch.full((1, 4), 0.1), torch.zeros(1, 4), 1.0)
    tensor([20.0000], dtype=torch.float64)
    """
    error_N = (guess.double() - true.double()).square().flatten(1).mean(1)
    return (10 * torch.log10(span**2 / error_N)).clamp(max=SAME)
