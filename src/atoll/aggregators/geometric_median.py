"""The geometric median."""

from __future__ import annotations

import torch
from torch import Tensor

from atoll.aggregators.columns import weighted_sum
from atoll.aggregators.geometry import coordinates
from atoll.core.aggregator import Aggregator, stacked
from atoll.core.options import Count, Positive


def geometric_median(nu: Positive = 1e-6, iterations: Count = 100) -> Aggregator:
    """Minimise the sum of the distances to all updates by the smoothed Weiszfeld algorithm; ignore weights.

        z <- sum_i b_i x_i / sum_i b_i,   b_i = 1 / max(nu, |x_i - z|)

    (Pillutla et al. 2022, arXiv:1912.13445, algorithm 2, with equal weights.) Any n is allowed; breakdown point 1/2. It
    starts at the mean of the n // 2 + 1 updates nearest to the one with the least sum of distances. The sum never
    increases from there, so that even after few iterations a bad minority moves the result by a bounded amount.
    """

    def rule(updates_CD: Tensor, weight_C: Tensor) -> Tensor:
        return weighted_sum(_weiszfeld(coordinates(updates_CD), nu, iterations), updates_CD)

    return stacked(rule, rotation_equivariant=True, translation_equivariant=True, bounded=True)


def _weiszfeld(point_CC: Tensor, nu: float, iterations: int) -> Tensor:
    """Return the share of each point in the geometric median."""
    distance_CC = torch.stack([(point_CC - point).norm(dim=1) for point in point_CC])
    sum_C = distance_CC.sum(1)
    medoids = (sum_C <= sum_C.min() * (1 + 1e-9)).nonzero()[:, 0]  # on a line the two middle points tie
    majority = distance_CC[medoids].argsort(dim=1, stable=True)[:, : len(point_CC) // 2 + 1].flatten()
    share_C = majority.bincount(minlength=len(point_CC)).to(sum_C) / len(majority)
    for _ in range(iterations):
        share_C = 1 / (point_CC - share_C @ point_CC).norm(dim=1).clamp(min=nu)
        share_C = share_C / share_C.sum()
    return share_C
