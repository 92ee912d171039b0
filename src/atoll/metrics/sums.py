"""Means over samples or outputs: the sum of a value by weight, and of the weights. Shapes: N samples, L outputs."""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import Tensor

from atoll.core.messages import State
from atoll.core.metric import Figures, Metric
from atoll.metrics.counts import Array, arrays
from atoll.metrics.forms import Rows, rows

ROUNDING = 1e-6
"""By how much a sum of values may exceed their bound."""


def weighted_mean(
    name: str,
    takes: tuple[str, ...],
    value: Callable[[Rows], Tensor],
    *,
    figure: str = "",
    after: Callable[[Array], Array] = lambda mean_L: mean_L,
    larger_is_better: bool = True,
    largest: float = math.inf,
    counts: bool = False,
) -> Metric:
    """Return the metric of a value of each sample, (N,), or of each output, (N, L): `after` of the mean.

    A value is at least 0 and at most `largest`; with `counts` it is 0 or 1.
    """
    largest = 1.0 if counts else largest

    def add(scores: Tensor, targets: Tensor, weight_N: Tensor) -> State:
        samples = rows(name, takes, scores, targets, weight_N)
        return {"sum": samples.weight_N @ value(samples).double(), "count": samples.weight_N.sum()}

    def finish(part: State) -> Figures:
        sums = arrays(part)
        if not sums["count"] > 0 or not sums["sum"].size:
            return {figure or name: float("nan")}
        return {figure or name: float(after(sums["sum"] / sums["count"]).mean())}

    def plausible(sums: State, least: float, most: float) -> bool:
        sum_L, count = sums["sum"], float(sums["count"])
        within = bool((sum_L >= 0).all()) and bool((sum_L <= largest * max(count, ROUNDING) + ROUNDING).all())
        return least <= count <= most and within

    sensitivity = (lambda sums: math.sqrt(2)) if counts else None
    return Metric(
        add,
        finish,
        larger_is_better=larger_is_better,
        main=figure,
        plausible=plausible,
        sensitivity=sensitivity,
    )


def squared_errors(samples: Rows) -> Tensor:
    """Return (score - target)^2 of each output, (N, L) in float64."""
    return (samples.columns.double() - samples.target_columns).square()
