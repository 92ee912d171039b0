"""Noise that gives all gradients of a batch the length of the longest."""

from __future__ import annotations

import torch
from torch import Tensor

from atoll.core.defence import Defence, Key
from atoll.split.shield import normal

EXAMPLE = {"test_noise": True}


def max_norm(test_noise: bool = False) -> Defence:
    """Stretch each gradient at random along its own direction (Li et al. 2022, arXiv:2102.08504, section 4.1).

    g' = g + sqrt(max_j |g_j|^2 / |g|^2 - 1) * n * g, with one standard normal n a sample: the expected square of its
    length is that of the longest. Directions, up to their sign, stay as they are. It claims nothing.
    """

    def perturb(grads_B: Tensor, labels_B: Tensor, key: Key) -> Tensor:
        square_B = grads_B.flatten(1).square().sum(1)
        ratio_B = square_B.max() / square_B.clamp(min=torch.finfo(grads_B.dtype).tiny)
        stretch_B = (ratio_B - 1).clamp(min=0).sqrt() * (square_B > 0)
        drawn_B = normal(key(grads_B), (len(grads_B),), grads_B.dtype)
        return grads_B * (1 + stretch_B * drawn_B).view(-1, *[1] * (grads_B.dim() - 1))

    return Defence(perturb=perturb, draws=True, test_noise=test_noise)
