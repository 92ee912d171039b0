"""The covariance-bound agnostic filter."""

from __future__ import annotations

import torch
from torch import Tensor

from atoll.aggregators.columns import weighted_sum
from atoll.aggregators.geometry import BadClients, coordinates, needs_updates
from atoll.core.aggregator import Aggregator, stacked

EXAMPLES = [{"f": 1}, {"f": 2}]


def caf(f: BadClients) -> Aggregator:
    """Reduce the weights of outliers along the direction of largest variance; return the mean with least variance.

    While the weights c sum to more than n - 2f: with the mean m and the first eigenvector v of the covariance under c,

        t_i = <v, x_i - m>^2,   c_i <- c_i (1 - t_i / max_j t_j)

    and the result is the m whose covariance had the least first eigenvalue (Allouah et al. 2025, arXiv:2505.01874, the
    covariance-bound agnostic filter). It needs n >= 2f + 1; breakdown point f / n, below 1/2. No bound on the variance
    of honest updates is needed. Weights n_k are ignored. The maximum is over clients with c_j > 0, so that each step
    sets at least one weight to 0.
    """
    least = 2 * f + 1

    def rule(updates_CD: Tensor, weight_C: Tensor) -> Tensor:
        return weighted_sum(_filter(coordinates(updates_CD), f), updates_CD)

    return stacked(
        rule,
        min_updates=least,
        needs=needs_updates("caf", f, "2f + 1", least),
        rotation_equivariant=True,
        translation_equivariant=True,
        bounded=True,
    )


def _filter(point_CC: Tensor, f: int) -> Tensor:
    """Return the share of each point in the mean with the least first eigenvalue."""
    weight_C = torch.ones_like(point_CC[:, 0])
    best_C, least_variance = weight_C / len(weight_C), float("inf")
    while float(weight_C.sum()) > len(point_CC) - 2 * f:
        share_C = weight_C / weight_C.sum()
        centred_CC = point_CC - share_C @ point_CC
        eigenvalue_C, eigenvector_CC = torch.linalg.eigh(centred_CC.T @ (share_C[:, None] * centred_CC))
        if float(eigenvalue_C[-1]) < least_variance:
            best_C, least_variance = share_C, float(eigenvalue_C[-1])
        score_C = (centred_CC @ eigenvector_CC[:, -1]).square()
        largest = float(score_C[weight_C > 0].max())
        if largest == 0:
            break
        weight_C = weight_C * (1 - score_C / largest)
        weight_C[weight_C < 1e-9] = 0  # rounding errors of equal updates must not be the maximum again
    return best_C
