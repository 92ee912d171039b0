"""Gaussian noise on gradients that labels could be read from."""

from __future__ import annotations

from typing import Annotated

from torch import Tensor

from atoll.core.defence import Defence, Key
from atoll.core.options import above
from atoll.split.shield import normal

EXAMPLE = {"scale": 1.0, "test_noise": True}


def isotropic(scale: Annotated[float, above(0, "leave isotropic out for none")], test_noise: bool = False) -> Defence:
    """Add Gaussian noise of one size to the gradients of all samples of a piece (Li et al. 2022, arXiv:2102.08504).

    g' = g + scale * max_j |g_j| / sqrt(d) * n, with n standard normal and d values of a sample: at scale 1 the noise is
    as long as the longest gradient (`iso` of section 4.1). It claims nothing: the longest gradient is itself data.
    """

    def perturb(grads_B: Tensor, labels_B: Tensor, key: Key) -> Tensor:
        flat_B = grads_B.flatten(1)
        size = scale * flat_B.norm(dim=1).max() / flat_B.shape[1] ** 0.5
        noisy_B: Tensor = grads_B + size * normal(key(grads_B), grads_B.shape, grads_B.dtype)
        return noisy_B

    return Defence(perturb=perturb, draws=True, test_noise=test_noise)
