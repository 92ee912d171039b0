"""Minimum-diameter averaging."""

from __future__ import annotations

from typing import Annotated

import numpy as np
import torch
from torch import Tensor

from atoll.aggregators.columns import Array, weighted_sum
from atoll.aggregators.geometry import needs_updates, squared_distances
from atoll.core.aggregator import Aggregator, stacked
from atoll.core.options import Range

MAX_F = 12
"""Largest f: the search tries up to 2^f sets."""
TOO_MANY = "it tries up to 2^f sets; for more use nnm with trimmed_mean"
EXAMPLES = [{"f": 1}, {"f": 2}]


def minimum_diameter(f: Annotated[int, Range(0, MAX_F, hint=TOO_MANY)]) -> Aggregator:
    """Average the n - f updates whose largest pairwise distance is least; ignore weights.

    (Rousseeuw 1985; El Mhamdi et al. 2021, arXiv:2008.00742.) It needs n >= 2f + 1; breakdown point f / n,
    below 1/2. Among sets with the same diameter, the least sum of squared distances decides. To reduce the diameter,
    one end of the longest distance must be removed, so that 2^f sets are tried instead of all subsets; f is at most 12.
    """
    least = 2 * f + 1

    def rule(updates_CD: Tensor, weight_C: Tensor) -> Tensor:
        kept = _minimum_diameter_set(squared_distances(updates_CD).numpy(), f)
        share_C = torch.zeros(len(updates_CD), dtype=torch.float64)
        share_C[kept] = 1 / len(kept)
        return weighted_sum(share_C, updates_CD)

    return stacked(
        rule,
        min_updates=least,
        needs=needs_updates("minimum_diameter", f, "2f + 1", least),
        rotation_equivariant=True,
        translation_equivariant=True,
        bounded=True,
    )


def _minimum_diameter_set(square_CC: Array, f: int) -> list[int]:
    """Return the n - f points with the least diameter."""
    candidates = {frozenset(range(len(square_CC)))}
    for _ in range(f):
        candidates = {points - {end} for points in candidates for end in _farthest_pair(square_CC, points)}

    def size(points: frozenset[int]) -> tuple[float, float]:
        inner = square_CC[np.ix_(sorted(points), sorted(points))]
        return float(inner.max()), float(inner.sum())

    best: frozenset[int] = min(candidates, key=lambda points: (*size(points), sorted(points)))
    return sorted(best)


def _farthest_pair(square_CC: Array, points: frozenset[int]) -> tuple[int, int]:
    """Return the two points that are farthest from each other."""
    rows = sorted(points)
    first, second = divmod(int(square_CC[np.ix_(rows, rows)].argmax()), len(rows))
    return rows[first], rows[second]
