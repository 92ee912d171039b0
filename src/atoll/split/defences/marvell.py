"""Marvell: the noise on gradients of two classes that tells them apart least."""

from __future__ import annotations

from typing import Annotated, NamedTuple

import numpy as np
import torch
from scipy.optimize import minimize
from torch import Tensor

from atoll.core.defence import Defence, Key
from atoll.core.options import above
from atoll.split.shield import normal

EXAMPLE = {"scale": 2.0, "test_noise": True}
ROUNDS = 200
"""Steps of the search for the spread of noise."""


class Spread(NamedTuple):
    """Variances of each class's noise: along the difference of the classes' means, and in every other direction."""

    along: tuple[float, float]
    across: tuple[float, float]


def marvell(scale: Annotated[float, above(0, "leave marvell out for none")], test_noise: bool = False) -> Defence:
    """Add Gaussian noise whose spread differs by class and direction (Li et al. 2022, arXiv:2102.08504, theorem 2).

    Of all noise with a mean square of `scale` * |m_1 - m_0|^2 a sample, m the classes' mean gradients of a piece, this
    one has the least sum of Kullback-Leibler divergences between the classes, if gradients are normal around their
    means. A piece of one class alone gets noise of `scale` times its mean square. It claims nothing of an adversary
    that knows more than one gradient at a time.
    """

    def perturb(grads_B: Tensor, labels_B: Tensor, key: Key) -> Tensor:
        flat_B = grads_B.flatten(1).double()
        drawn_B = normal(key(grads_B), flat_B.shape, torch.float64)
        positive_B = labels_B.reshape(len(labels_B), -1)[:, 0] > 0
        if bool(positive_B.all()) or not bool(positive_B.any()):
            size = (scale * flat_B.square().sum(1).mean() / flat_B.shape[1]).sqrt()
            return (flat_B + size * drawn_B).to(grads_B.dtype).view(grads_B.shape)
        means = [flat_B[positive_B == bool(side)].mean(0) for side in (0, 1)]
        gap = means[1] - means[0]
        spread = best_spread(flat_B, positive_B, means, scale)
        unit = gap / gap.norm().clamp(min=1e-300)
        along_B = (drawn_B @ unit).unsqueeze(1) * unit
        sides = positive_B.long().unsqueeze(1)
        sizes = [torch.tensor(each, dtype=torch.float64).sqrt()[sides] for each in spread]
        noisy_B = flat_B + sizes[0] * along_B + sizes[1] * (drawn_B - along_B)
        found: Tensor = noisy_B.to(grads_B.dtype).view(grads_B.shape)
        return found

    return Defence(perturb=perturb, draws=True, test_noise=test_noise, binary=True)


def best_spread(flat_B: Tensor, positive_B: Tensor, means: list[Tensor], scale: float) -> Spread:
    """Search for the variances of least divergence within the power `scale` * |m_1 - m_0|^2.

    With u_0, u_1 the classes' own variances a direction and d directions, and l, k the variances along and across,
    minimise (d - 1) (k_0 + u_0) / (k_1 + u_1) + (l_0 + u_0 + |m_1 - m_0|^2) / (l_1 + u_1), plus both with the classes
    exchanged, where p (l_1 + (d - 1) k_1) + (1 - p) (l_0 + (d - 1) k_0) is the power and p the share of class 1.
    """
    num, share = flat_B.shape[1], float(positive_B.double().mean())
    square = float((means[1] - means[0]).square().sum())
    if square == 0.0:
        return Spread((0.0, 0.0), (0.0, 0.0))
    own = [float((flat_B[positive_B == bool(s)] - means[s]).square().sum(1).mean()) / num / square for s in (0, 1)]
    u0, u1 = (max(each, 1e-9) for each in own)

    def divergence(logits: np.ndarray) -> float:
        l0, l1, k0, k1 = _variances(logits, scale, share, num)
        across = (num - 1) * ((k0 + u0) / (k1 + u1) + (k1 + u1) / (k0 + u0))
        return float(across + (l0 + u0 + 1) / (l1 + u1) + (l1 + u1 + 1) / (l0 + u0))

    starts = [np.array([0.0, 0.0, -6.0, -6.0]), np.array([2.0, -2.0, -6.0, -6.0]), np.array([-2.0, 2.0, -6.0, -6.0])]
    tries = [minimize(divergence, start, method="Nelder-Mead", options={"maxiter": ROUNDS}) for start in starts]
    best = min(tries, key=lambda each: float(each.fun))
    l0, l1, k0, k1 = (float(each) * square for each in _variances(best.x, scale, share, num))
    return Spread((l0, l1), (k0, k1))


def _variances(logits: np.ndarray, power: float, share: float, num: int) -> tuple[float, float, float, float]:
    """Return variances that use the whole power, from any four numbers."""
    parts = np.exp(logits - logits.max())
    parts = power * parts / parts.sum()
    others = max(1, num - 1)
    l0, k0 = parts[0] / (1 - share), parts[2] / (1 - share) / others
    l1, k1 = parts[1] / share, parts[3] / share / others
    return float(l0), float(l1), float(k0), float(k1)
