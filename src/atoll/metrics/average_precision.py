"""Average precision. Shapes: G groups of equal scores."""

from __future__ import annotations

import numpy as np

from atoll.core.metric import Metric
from atoll.metrics import ranking
from atoll.metrics.counts import Array, shares

TAKES = ranking.TAKES


def average_precision() -> Metric:
    """Return the mean over positive samples of the precision at their score: sum_n (R_n - R_n-1) P_n.

    Of classes it is the mean of each against the rest, over those that occur. Between places each
    sends histograms: `average_precision_error` is how far any order of the samples within bins can move the figure.
    """
    return ranking.ranked("average_precision", mean_precision)


def mean_precision(positive_G: Array, negative_G: Array) -> ranking.Bounds | None:
    """Return the average precision from the weights of each group, in ascending order of scores; None of none.

    Within a group precision is at most that of all its positive samples before its first negative one, and at least
    that of negative samples first: the integral of (t + s) / (t + s + f) over s, for t and f true and false positives
    before, counts every positive sample at no more than its own precision.
    """
    positive_G, negative_G = positive_G[::-1], negative_G[::-1]
    true_G, false_G = np.cumsum(positive_G), np.cumsum(negative_G)
    total = true_G[-1] if len(true_G) else 0.0
    if total == 0:
        return None
    before_G = true_G - positive_G + false_G
    low_G = positive_G - false_G * np.log1p(shares(positive_G, before_G))
    value_G = positive_G * shares(true_G, true_G + false_G)
    high_G = positive_G * shares(true_G, true_G + false_G - negative_G)
    value, low, high = (float(each.sum() / total) for each in (value_G, low_G, high_G))
    return ranking.Bounds(value, low, high)
