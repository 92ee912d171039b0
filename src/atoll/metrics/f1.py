"""F1."""

from __future__ import annotations

from atoll.core.metric import Metric
from atoll.metrics import counts

TAKES = counts.TAKES
EXAMPLES = [{}, {"average": "weighted"}, {"average": "micro"}]


def f1(average: counts.Average = "macro") -> Metric:
    """Return the harmonic mean of precision and recall: 2 hits / (true + predicted), averaged over classes."""
    return counts.averaged("f1", average, lambda hits, true, predicted: (2 * hits, true + predicted))
