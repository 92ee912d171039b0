"""Accuracy."""

from __future__ import annotations

from torch import Tensor

from atoll.core.metric import Metric
from atoll.metrics.forms import BINARY, CLASSES, LABELS, Rows
from atoll.metrics.probabilities import as_classes, predicted_labels
from atoll.metrics.sums import weighted_mean

TAKES = (CLASSES, BINARY, LABELS)


def right_answers(samples: Rows) -> Tensor:
    """Return whether each sample is answered rightly, (N,); of several labels, whether all are."""
    if samples.form == LABELS:
        return (predicted_labels(samples.scores) == samples.targets.bool()).all(1)
    predicted_N, true_N, _ = as_classes(samples)
    return predicted_N == true_N


def accuracy() -> Metric:
    """Return the share of samples that are answered rightly; of several labels all must be right."""
    return weighted_mean("accuracy", TAKES, right_answers, counts=True)
