"""Bulyan."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from atoll.aggregators.columns import Array, by_sorted_columns
from atoll.aggregators.geometry import BadClients, at_least, by_krum_score, squared_distances
from atoll.core.aggregator import Aggregator, stacked

EXAMPLES = [{"f": 1}, {"f": 2}]


def bulyan(f: BadClients) -> Aggregator:
    """Let Krum pick n - 2f updates one after another, then average in each coordinate those nearest to its median.

    (El Mhamdi et al. 2018, arXiv:1802.07927, section 4: theta = n - 2f are picked, and the theta - 2f values nearest to
    their median are averaged.) It needs n >= 4f + 3; breakdown point (n - 3) / 4n, below 1/4: every coordinate lies
    within the range of the honest ones. Weights are ignored.
    """
    least = 4 * f + 3

    def rule(updates_CD: Tensor, weight_C: Tensor) -> Tensor:
        picked = _picked(squared_distances(updates_CD), f)
        return by_sorted_columns(updates_CD, lambda sorted_BC: _around_median(sorted_BC, f), picked)

    return stacked(
        rule,
        min_updates=least,
        needs=at_least("bulyan", f, "4f + 3", least),
        translation_equivariant=True,
        bounded=True,
    )


def _picked(square_CC: Tensor, f: int) -> list[int]:
    """Rows that Krum takes, each time from those that are left."""
    left = torch.arange(len(square_CC))
    picked = []
    for _ in range(len(square_CC) - 2 * f):
        best = int(by_krum_score(square_CC[left][:, left], f)[0])
        picked.append(int(left[best]))
        left = left[torch.arange(len(left)) != best]
    return picked


def _around_median(sorted_BC: Array, f: int) -> Array:
    """The mean of all but 2f values, those farthest from the median; sorted, the nearest lie side by side."""
    num = sorted_BC.shape[1]
    kept = num - 2 * f
    middle_B = sorted_BC[:, (num - 1) // 2] / 2 + sorted_BC[:, num // 2] / 2
    lower, upper = sorted_BC[:, : 2 * f], sorted_BC[:, kept:]
    first_B = (middle_B[:, None] - lower > upper - middle_B[:, None]).sum(axis=1)  # while the next one is nearer
    place_BC = np.arange(num) - first_B[:, None]
    found: Array = np.where((place_BC >= 0) & (place_BC < kept), sorted_BC, 0).sum(axis=1) / kept
    return found.astype(sorted_BC.dtype)
