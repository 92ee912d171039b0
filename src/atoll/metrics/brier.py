"""The Brier score."""

from __future__ import annotations

from torch import Tensor

from atoll.core.metric import Metric
from atoll.metrics.forms import BINARY, CLASSES, LABELS, Rows
from atoll.metrics.probabilities import chances, one_hot
from atoll.metrics.sums import weighted_mean

TAKES = (CLASSES, BINARY, LABELS)


def brier() -> Metric:
    """Return the mean squared error of probabilities (Brier 1950).

    (p - y)^2 of each logit, and the sum over classes of (p_k - y_k)^2, half of it for two classes, so that both ways
    to write two classes give the same; of several labels the mean.
    """

    def error(samples: Rows) -> Tensor:
        chance_NK = chances(samples)
        if samples.form != CLASSES:
            return (chance_NK - samples.target_columns).square()
        num_classes = chance_NK.shape[1]
        squares_N = (chance_NK - one_hot(samples.targets, num_classes)).square().sum(1)
        return squares_N / 2 if num_classes == 2 else squares_N

    return weighted_mean("brier", TAKES, error, larger_is_better=False, largest=2.0)
