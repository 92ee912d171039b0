"""Bulyan."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from atoll.aggregators.columns import Array, reduce_sorted_columns
from atoll.aggregators.geometry import BadClients, needs_updates, rank_by_krum, squared_distances
from atoll.core.aggregator import Aggregator, stacked

EXAMPLES = [{"f": 1}, {"f": 2}]


def bulyan(f: BadClients) -> Aggregator:
    """Select n - 2f updates by repeated Krum, then average in each coordinate the values nearest to their median.

    (El Mhamdi et al. 2018, arXiv:1802.07927, section 4: theta = n - 2f are selected, and the theta - 2f values nearest
    to their median are averaged.) It needs n >= 4f + 3; breakdown point (n - 3) / 4n, below 1/4. A bad value is only
    averaged if it is as near to the median as honest ones are, so that no coordinate is farther from the range of the
    honest ones than that range is wide. Weights are ignored.
    """
    least = 4 * f + 3

    def rule(updates_CD: Tensor, weight_C: Tensor) -> Tensor:
        selected = _select(squared_distances(updates_CD), f)
        return reduce_sorted_columns(updates_CD, lambda sorted_BC: _mean_around_median(sorted_BC, f), selected)

    return stacked(
        rule,
        min_updates=least,
        needs=needs_updates("bulyan", f, "4f + 3", least),
        translation_equivariant=True,
        bounded=True,
    )


def _select(square_CC: Tensor, f: int) -> list[int]:
    """Return n - 2f rows: Krum's choice, removed, then its choice among the remaining ones, and so on."""
    remaining = torch.arange(len(square_CC))
    selected = []
    for _ in range(len(square_CC) - 2 * f):
        best = int(rank_by_krum(square_CC[remaining][:, remaining], f)[0])
        selected.append(int(remaining[best]))
        remaining = remaining[torch.arange(len(remaining)) != best]
    return selected


def _mean_around_median(sorted_BC: Array, f: int) -> Array:
    """Return the mean of each row without the 2f values farthest from its median; the kept ones are adjacent."""
    num = sorted_BC.shape[1]
    kept = num - 2 * f
    median_B = sorted_BC[:, (num - 1) // 2] / 2 + sorted_BC[:, num // 2] / 2
    lower, upper = sorted_BC[:, : 2 * f], sorted_BC[:, kept:]
    # The window of kept values moves up by one for each lowest value that is farther away than the next highest.
    first_B = (median_B[:, None] - lower > upper - median_B[:, None]).sum(axis=1)
    offset_BC = np.arange(num) - first_B[:, None]
    mean_B: Array = np.where((offset_BC >= 0) & (offset_BC < kept), sorted_BC, 0).sum(axis=1) / kept
    return mean_B.astype(sorted_BC.dtype)
