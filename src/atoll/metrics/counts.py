"""Counts of right, true and predicted answers, and ratios of them. Shapes: N samples, K classes or L labels."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from atoll.core.messages import State
from atoll.core.metric import Figures, Metric
from atoll.metrics.forms import BINARY, CLASSES, LABELS, Rows, rows
from atoll.metrics.probabilities import as_classes, predicted_labels

Array = np.ndarray[Any, np.dtype[Any]]
Average = Literal["macro", "weighted", "micro"]
TAKES = (CLASSES, BINARY, LABELS)


def class_counts(samples: Rows) -> State:
    """Return how often each class is predicted rightly, true, and predicted, by weight; two classes for one logit."""
    predicted_N, true_N, num_classes = as_classes(samples)
    right_N = predicted_N == true_N
    return {
        "hits": tally(true_N[right_N], samples.weight_N[right_N], num_classes),
        "true": tally(true_N, samples.weight_N, num_classes),
        "predicted": tally(predicted_N, samples.weight_N, num_classes),
    }


def label_counts(samples: Rows) -> State:
    """Return how often each label is predicted rightly, true, and predicted, by weight; one label for one logit."""
    predicted_NL = predicted_labels(samples.columns).double()
    true_NL = samples.target_columns.double()
    weight_N = samples.weight_N
    return {
        "hits": weight_N @ (predicted_NL * true_NL),
        "true": weight_N @ true_NL,
        "predicted": weight_N @ predicted_NL,
    }


def tally(index_N: Tensor, weight_N: Tensor, length: int) -> Tensor:
    """Return the summed weight of each index, in float64."""
    return torch.bincount(index_N, weights=weight_N, minlength=length).double()


CLASS_COUNTS_MOVE = math.sqrt(3)
"""L2 distance by which one sample moves `class_counts`: one more hit, truth and prediction."""


def are_counts(sums: State, least: float, most: float) -> bool:
    """Return whether sums can be those of `class_counts` or `label_counts`, of samples of such a weight in all."""
    counts = arrays(sums)
    hits_K, true_K = counts["hits"], counts["true"]
    predicted_K = counts.get("predicted", true_K)
    within = bool((hits_K >= 0).all() and (hits_K <= true_K).all() and (hits_K <= predicted_K).all())
    return within and bool((np.maximum(true_K, predicted_K) <= most).all())


def are_class_counts(sums: State, least: float, most: float) -> bool:
    """Return whether sums can be those of `class_counts`: each sample has one true and one predicted class."""
    totals = [float(sums[name].sum()) for name in ("true", "predicted") if name in sums]
    return are_counts(sums, least, most) and all(least <= total <= most for total in totals)


def arrays(part: State) -> dict[str, Array]:
    """Return the tensors of a part as NumPy arrays."""
    return {name: value.cpu().numpy() for name, value in part.items()}


def shares(numerator: Any, denominator: Any, otherwise: float = 0.0) -> Any:
    """Divide, and put `otherwise` where there is nothing to divide by.

    >>> shares(np.array([1.0, 0.0]), np.array([2.0, 0.0]))
    array([0.5, 0. ])
    """
    safe = np.where(denominator > 0, denominator, 1)
    return np.where(denominator > 0, numerator / safe, otherwise)


def mean_or_nan(values: Array) -> float:
    """Return the mean; NaN of nothing."""
    return float(values.mean()) if len(values) else float("nan")


def averaged(name: str, average: Average, ratio: Callable[[Array, Array, Array], tuple[Array, Array]]) -> Metric:
    """Return the metric of a ratio of counts of each class or label, over those that occur as truth or prediction.

    One logit a sample is one label: all three averages are the ratio of the positive class. A ratio with nothing to
    divide by is 0, as in scikit-learn. `macro`: the plain mean; `weighted`: by how often a class is true; `micro`:
    counts are added up first.
    """
    figure = name if average == "macro" else f"{name}_{average}"

    def add(scores: Tensor, targets: Tensor, weight_N: Tensor) -> State:
        samples = rows(name, TAKES, scores, targets, weight_N)
        return class_counts(samples) if samples.form == CLASSES else label_counts(samples)

    def finish(part: State) -> Figures:
        counts = arrays(part)
        hits_K, true_K, predicted_K = counts["hits"], counts["true"], counts["predicted"]
        occurs_K = (true_K + predicted_K) > 0
        if not occurs_K.any():
            return {figure: float("nan")}
        if average == "micro":
            return {figure: float(shares(*ratio(hits_K.sum(), true_K.sum(), predicted_K.sum())))}
        value_K = shares(*ratio(hits_K, true_K, predicted_K))
        if average == "weighted":
            return {figure: float(shares((true_K * value_K).sum(), true_K.sum()))}
        return {figure: float(value_K[occurs_K].mean())}

    def move(sums: State) -> float:
        return math.sqrt(3 * len(sums["hits"]))

    return Metric(add, finish, plausible=are_counts, sensitivity=move, main=figure)
