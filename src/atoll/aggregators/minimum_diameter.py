"""Minimum-diameter averaging."""

from __future__ import annotations

from typing import Annotated

import numpy as np
import torch
from torch import Tensor

from atoll.aggregators.columns import Array, combined
from atoll.aggregators.geometry import at_least, squared_distances
from atoll.core.aggregator import Aggregator, stacked
from atoll.core.options import Range

MOST = 12
"""The search takes up to 2^f steps."""
TOO_MANY = "it tries up to 2^f sets; for more use nnm with trimmed_mean"
EXAMPLES = [{"f": 1}, {"f": 2}]


def minimum_diameter(f: Annotated[int, Range(0, MOST, hint=TOO_MANY)]) -> Aggregator:
    """Average the n - f updates whose largest distance from each other is least, weights aside.

    (Rousseeuw 1985; El Mhamdi et al. 2021, arXiv:2008.00742.) It needs n >= 2f + 1; breakdown point f / n,
    below 1/2. Of sets with the same diameter the one with the least sum of squared distances counts. A smaller diameter
    needs one end of the longest distance to go, so that 2^f ways are tried, not all subsets; f may be up to 12.
    """
    least = 2 * f + 1

    def rule(updates_CD: Tensor, weight_C: Tensor) -> Tensor:
        kept = _tightest(squared_distances(updates_CD).numpy(), f)
        share_C = torch.zeros(len(updates_CD), dtype=torch.float64)
        share_C[kept] = 1 / len(kept)
        return combined(share_C, updates_CD)

    return stacked(
        rule,
        min_updates=least,
        needs=at_least("minimum_diameter", f, "2f + 1", least),
        rotation_equivariant=True,
        translation_equivariant=True,
        bounded=True,
    )


def _tightest(square_CC: Array, f: int) -> list[int]:
    """The points that are left when f are taken away for the least diameter."""
    ways = {frozenset(range(len(square_CC)))}
    for _ in range(f):
        ways = {left - {end} for left in ways for end in _ends(square_CC, left)}

    def size(left: frozenset[int]) -> tuple[float, float]:
        inner = square_CC[np.ix_(sorted(left), sorted(left))]
        return float(inner.max()), float(inner.sum())

    best: frozenset[int] = min(ways, key=lambda left: (*size(left), sorted(left)))
    return sorted(best)


def _ends(square_CC: Array, left: frozenset[int]) -> tuple[int, int]:
    """The two points that are farthest from each other."""
    who = sorted(left)
    first, second = divmod(int(square_CC[np.ix_(who, who)].argmax()), len(who))
    return who[first], who[second]
