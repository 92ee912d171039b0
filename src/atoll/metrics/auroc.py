"""The area under the receiver operating characteristic. Shapes: G groups of equal scores in ascending order."""

from __future__ import annotations

import numpy as np

from atoll.core.metric import Metric
from atoll.metrics import ranking
from atoll.metrics.counts import Array

TAKES = ranking.TAKES


def auroc() -> Metric:
    """Return the chance that a positive sample scores higher than a negative one, equal scores counting half.

    Of classes it is the mean of each against the rest, over those with samples of both kinds. Between places each
    sends histograms: pairs of one bin count half, so that `auroc_error` is half the share of such pairs.
    """
    return ranking.ranked("auroc", area)


def area(positive_G: Array, negative_G: Array) -> ranking.Bounds | None:
    """Return the area from the weights of each group; None without samples of both kinds.

    >>> area(np.array([0.0, 1.0, 1.0]), np.array([1.0, 1.0, 0.0]))
    Bounds(value=0.875, low=0.75, high=1.0)
    """
    pairs = positive_G.sum() * negative_G.sum()
    if pairs == 0:
        return None
    value = float(positive_G @ (np.cumsum(negative_G) - negative_G / 2) / pairs)
    half = float(positive_G @ negative_G / pairs / 2)
    return ranking.Bounds(value, value - half, value + half)
