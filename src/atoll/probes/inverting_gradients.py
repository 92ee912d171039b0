"""Inverting gradients. Shapes: N samples, B batch, H height, W width."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from atoll.core.options import Count, NotNegative, Positive
from atoll.core.probe import SAMPLES, Guess, Known, Probe, Sight, Work
from atoll.probes.matching import Search, cosine_distance, no_search, search

DROPS = (3 / 8, 5 / 8, 7 / 8)
"""Shares of all iterations after which steps become a tenth."""
NEAR = 1e-4
"""The distance below which no other beginning is tried."""


def inverting_gradients(
    restarts: Count = 2, iterations: Count = 600, lr: Positive = 0.01, smoothness: NotNegative = 1e-2
) -> Probe:
    """Minimise the angle of gradients and total variation by Adam on signs (Geiping et al. 2020, arXiv:2003.14053).

    x* = argmin_x 1 - cos(grad L(x, y), seen) + smoothness TV(x) (eq. 4), by Adam on the sign of the gradient, with
    steps of `lr` of the features' range that become smaller thrice (section 4). Angles serve where lengths do not: with
    kinked activations, and in batches. Of all beginnings the nearest in angle is taken.
    """

    def run(known: Known, sights: Sequence[Sight], work: Work) -> list[Guess]:
        how = signed_search(known, restarts, iterations, lr, smoothness)
        return search(known, sights, work, how)

    return Probe(goal=SAMPLES, run=run, why_not=no_search)


def signed_search(known: Known, restarts: int, iterations: int, lr: float, smoothness: float) -> Search:
    """Return the search by angles, with total variation where samples are images."""
    span, images = known.high - known.low, len(known.input_shape) == 3

    def prior(x: Tensor) -> Tensor:
        return smoothness * total_variation(x) / span

    return Search(
        distance=cosine_distance,
        descend=lambda objective, point, is_over: signed_adam(objective, point, is_over, iterations, lr),
        prior=prior if images else None,
        restarts=restarts,
        near=NEAR,
    )


def total_variation(images: Tensor) -> Tensor:
    """Return the mean absolute difference of neighbouring pixels, down and across (anisotropic).

    >>> total_variation(torch.tensor([[[[0.0, 1.0], [0.0, 1.0]]]]))
    tensor(1.)
    """
    return images.diff(dim=-2).abs().mean() + images.diff(dim=-1).abs().mean()


def signed_adam(
    objective: Callable[[Tensor], Tensor], point: Tensor, is_over: Callable[[], bool], iterations: int, lr: float
) -> Tensor:
    """Return the point at which Adam on signs of gradients arrives."""
    point = point.clone().requires_grad_()
    optimizer = torch.optim.Adam([point], lr=lr)
    drops = [round(share * iterations) for share in DROPS]
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, drops, 0.1)
    for _ in range(iterations):
        (slope,) = torch.autograd.grad(objective(point), point)
        point.grad = slope.sign()
        optimizer.step()
        schedule.step()
        if is_over():
            break
    return point.detach()
