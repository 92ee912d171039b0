"""R2, the coefficient of determination. Shapes: N samples, L outputs."""

from __future__ import annotations

from torch import Tensor

from atoll.core.messages import State
from atoll.core.metric import Figures, Metric
from atoll.metrics.counts import arrays, mean_or_nan
from atoll.metrics.forms import NUMBERS, rows
from atoll.metrics.sums import squared_errors

TAKES = (NUMBERS,)
CONSTANT = 1e-12
"""Targets whose variance is a smaller share of their mean square are equal up to rounding."""


def r2() -> Metric:
    """Return 1 - sum (target - score)^2 / sum (target - mean)^2, the mean over outputs; NaN if targets are all equal.

    An output with equal targets has no share. The sum below is taken as sum y^2 - (sum y)^2 / n in float64: its
    relative error is about 1e-16 (mean / deviation)^2.
    """

    def add(scores: Tensor, targets: Tensor, weight_N: Tensor) -> State:
        samples = rows("r2", TAKES, scores, targets, weight_N)
        target_NL, weight_N = samples.target_columns.double(), samples.weight_N
        return {
            "residual": weight_N @ squared_errors(samples),
            "sum": weight_N @ target_NL,
            "squares": weight_N @ target_NL.square(),
            "count": weight_N.sum(),
        }

    def finish(part: State) -> Figures:
        sums = arrays(part)
        if not sums["count"] > 0:
            return {"r2": float("nan")}
        total_L = sums["squares"] - sums["sum"] ** 2 / sums["count"]
        varies_L = ~(total_L <= CONSTANT * sums["squares"])  # NaN counts, and shows
        return {"r2": mean_or_nan(1 - sums["residual"][varies_L] / total_L[varies_L])}

    def plausible(sums: State, least: float, most: float) -> bool:
        count, squares_L = float(sums["count"]), sums["squares"]
        possible_L = squares_L * max(count, 1.0) * (1 + CONSTANT) >= sums["sum"].square()  # Cauchy-Schwarz
        return least <= count <= most and bool((sums["residual"] >= 0).all() and possible_L.all())

    return Metric(add, finish, plausible=plausible)
