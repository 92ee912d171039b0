"""Balanced accuracy."""

from __future__ import annotations

from torch import Tensor

from atoll.core.messages import State
from atoll.core.metric import Figures, Metric
from atoll.metrics.counts import CLASS_COUNTS_MOVE, are_class_counts, arrays, class_counts, mean_or_nan
from atoll.metrics.forms import BINARY, CLASSES, rows

TAKES = (CLASSES, BINARY)


def balanced_accuracy() -> Metric:
    """Return the mean recall of the classes that occur as truth."""

    def add(scores: Tensor, targets: Tensor, weight_N: Tensor) -> State:
        counts = class_counts(rows("balanced_accuracy", TAKES, scores, targets, weight_N))
        return {name: counts[name] for name in ("hits", "true")}

    def finish(part: State) -> Figures:
        counts = arrays(part)
        occurs_K = counts["true"] > 0
        return {"balanced_accuracy": mean_or_nan(counts["hits"][occurs_K] / counts["true"][occurs_K])}

    return Metric(add, finish, plausible=are_class_counts, sensitivity=lambda sums: CLASS_COUNTS_MOVE)
