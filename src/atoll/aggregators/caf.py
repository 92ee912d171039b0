"""The covariance-bound agnostic filter."""

from __future__ import annotations

import torch
from torch import Tensor

from atoll.aggregators.columns import combined
from atoll.aggregators.geometry import BadClients, at_least, coordinates
from atoll.core.aggregator import Aggregator, stacked

EXAMPLES = [{"f": 1}, {"f": 2}]


def caf(f: BadClients) -> Aggregator:
    """Lower the weight of updates that stick out along the direction of largest variance; keep the calmest mean.

    While the weights c sum to more than n - 2f: with the mean m and the first eigenvector v of the covariance under c,

        t_i = <v, x_i - m>^2,   c_i <- c_i (1 - t_i / max_j t_j)

    and the result is the m whose covariance had the least first eigenvalue (Allouah et al. 2025, arXiv:2505.01874, the
    covariance-bound agnostic filter). It needs n >= 2f + 1; breakdown point f / n, below 1/2. It need not know how far
    honest updates spread. Weights n_k are ignored. The maximum is over those with c_j > 0, so that each step rules at
    least one out.
    """
    least = 2 * f + 1

    def rule(updates_CD: Tensor, weight_C: Tensor) -> Tensor:
        return combined(_filtered(coordinates(updates_CD), f), updates_CD)

    return stacked(
        rule,
        min_updates=least,
        needs=at_least("caf", f, "2f + 1", least),
        rotation_equivariant=True,
        translation_equivariant=True,
        bounded=True,
    )


def _filtered(point_CC: Tensor, f: int) -> Tensor:
    """The share of each point in the mean that is kept."""
    weight_C = torch.ones_like(point_CC[:, 0])
    best_C, least_spread = weight_C / len(weight_C), float("inf")
    while float(weight_C.sum()) > len(point_CC) - 2 * f:
        share_C = weight_C / weight_C.sum()
        away_CC = point_CC - share_C @ point_CC
        value_C, vector_CC = torch.linalg.eigh(away_CC.T @ (share_C[:, None] * away_CC))
        if float(value_C[-1]) < least_spread:
            best_C, least_spread = share_C, float(value_C[-1])
        out_C = (away_CC @ vector_CC[:, -1]).square()
        largest = float(out_C[weight_C > 0].max())
        if largest == 0:
            break
        weight_C = weight_C * (1 - out_C / largest)
        weight_C[weight_C < 1e-9] = 0  # what rounding leaves of equal updates must not be the maximum again
    return best_C
