"""Matthews' correlation coefficient."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from atoll.core.messages import State
from atoll.core.metric import Figures, Metric
from atoll.metrics.counts import CLASS_COUNTS_MOVE, are_class_counts, arrays, class_counts
from atoll.metrics.forms import BINARY, CLASSES, rows

TAKES = (CLASSES, BINARY)


def mcc() -> Metric:
    """Return the correlation of predicted and true classes, 0 if either are all of one class.

        (n sum_k hits_k - sum_k true_k predicted_k) / sqrt((n^2 - sum_k predicted_k^2) (n^2 - sum_k true_k^2))

    (Gorodkin 2004, doi:10.1016/j.compbiolchem.2004.09.006, R_K.)
    """

    def add(scores: Tensor, targets: Tensor, weight_N: Tensor) -> State:
        return class_counts(rows("mcc", TAKES, scores, targets, weight_N))

    def finish(part: State) -> Figures:
        counts = arrays(part)
        total = counts["true"].sum()
        if not total > 0:
            return {"mcc": float("nan")}
        hits, true_K, predicted_K = counts["hits"].sum() / total, counts["true"] / total, counts["predicted"] / total
        spread = max(0.0, 1 - predicted_K @ predicted_K) * max(0.0, 1 - true_K @ true_K)
        several = (true_K > 0).sum() > 1 and (predicted_K > 0).sum() > 1
        return {"mcc": float((hits - true_K @ predicted_K) / np.sqrt(spread)) if several else 0.0}

    return Metric(add, finish, plausible=are_class_counts, sensitivity=lambda sums: CLASS_COUNTS_MOVE)
