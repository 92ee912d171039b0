"""Recall, or sensitivity."""

from __future__ import annotations

from atoll.core.metric import Metric
from atoll.metrics import counts

TAKES = counts.TAKES
EXAMPLES = [{}, {"average": "weighted"}, {"average": "micro"}]


def recall(average: counts.Average = "macro") -> Metric:
    """Return the share of a class's samples that are found: hits / true, averaged over classes."""
    return counts.averaged("recall", average, lambda hits, true, predicted: (hits, true))
