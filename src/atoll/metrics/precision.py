"""Precision."""

from __future__ import annotations

from atoll.core.metric import Metric
from atoll.metrics import counts

TAKES = counts.TAKES
EXAMPLES = [{}, {"average": "weighted"}, {"average": "micro"}]


def precision(average: counts.Average = "macro") -> Metric:
    """Return the share of right answers among those that say a class: hits / predicted, averaged over classes."""
    return counts.averaged("precision", average, lambda hits, true, predicted: (hits, predicted))
