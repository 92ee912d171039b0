"""The confusion matrix, and what it gives. Shapes: K classes."""

from __future__ import annotations

from typing import Annotated, Any

from torch import Tensor

from atoll.core.messages import State
from atoll.core.metric import Figures, Metric
from atoll.core.options import Range
from atoll.metrics.counts import CLASS_COUNTS_MOVE, are_class_counts, arrays, class_counts, shares, tally
from atoll.metrics.forms import BINARY, CLASSES, rows
from atoll.metrics.probabilities import as_classes

TAKES = (CLASSES, BINARY)
EXAMPLES = [{}, {"max_classes": 2}]


def confusion(max_classes: Annotated[int, Range(1, 4096)] = 256) -> Metric:
    """Return accuracy and macro precision, recall and F1 over the classes that occur, as truth or as prediction.

    The part is the matrix, true class x predicted class, and the chart draws it; with more than `max_classes` classes
    it is the counts of right, true and predicted answers of each class, which give the same figures.
    """

    def add(scores: Tensor, targets: Tensor, weight_N: Tensor) -> State:
        samples = rows("confusion", TAKES, scores, targets, weight_N)
        predicted_N, true_N, num_classes = as_classes(samples)
        if num_classes > max_classes:
            return class_counts(samples)
        pairs = tally(true_N * num_classes + predicted_N, samples.weight_N, num_classes**2)
        return {"confusion": pairs.view(num_classes, num_classes)}

    def finish(part: State) -> Figures:
        counts = arrays(part)
        if "confusion" in counts:
            matrix_KK = counts["confusion"]
            counts = {"hits": matrix_KK.diagonal(), "true": matrix_KK.sum(1), "predicted": matrix_KK.sum(0)}
        hits_K, true_K, predicted_K = counts["hits"], counts["true"], counts["predicted"]
        occurs_K = (true_K + predicted_K) > 0
        if not occurs_K.any():
            return dict.fromkeys(("accuracy", "precision", "recall", "f1"), float("nan"))
        return {
            "accuracy": float(hits_K.sum() / true_K.sum()),
            "precision": float(shares(hits_K, predicted_K)[occurs_K].mean()),
            "recall": float(shares(hits_K, true_K)[occurs_K].mean()),
            "f1": float(shares(2 * hits_K, true_K + predicted_K)[occurs_K].mean()),
        }

    def chart(part: State) -> dict[str, Any]:
        return {"matrix": part["confusion"].tolist()} if "confusion" in part else {}

    def plausible(sums: State, least: float, most: float) -> bool:
        if "confusion" not in sums:
            return are_class_counts(sums, least, most)
        return bool((sums["confusion"] >= 0).all()) and least <= float(sums["confusion"].sum()) <= most

    def sensitivity(sums: State) -> float:
        return 1.0 if "confusion" in sums else CLASS_COUNTS_MOVE

    return Metric(add, finish, chart=chart, plausible=plausible, sensitivity=sensitivity, main="accuracy")
