"""Kaplan-Meier curves by risk group. Shapes: N samples, T times of events."""

from __future__ import annotations

from typing import Annotated, Any

import numpy as np
from torch import Tensor

from atoll.core.messages import State
from atoll.core.metric import Metric
from atoll.core.options import Range
from atoll.metrics.counts import Array
from atoll.metrics.ranking import join
from atoll.metrics.survival import TAKES as TAKES
from atoll.metrics.survival import survival_arrays, survival_part


def kaplan_meier(max_points: Annotated[int, Range(2, 10_000)] = 500) -> Metric:
    """Draw the share that survives in time, of those whose risk is above the median and of the others; no figures.

        S(t) = product over times t_i <= t of events of (1 - events_i / at_risk_i)

    (Kaplan and Meier 1958, doi:10.1080/01621459.1958.10501452.) A curve of more than `max_points` steps is drawn by so
    many of them. Nothing of it leaves a place.
    """

    def add(scores: Tensor, targets: Tensor, weight_N: Tensor) -> State:
        return survival_part("kaplan_meier", scores, targets, weight_N)

    def chart(part: State) -> dict[str, Any]:
        risk_N, time_N, event_N, weight_N = survival_arrays(part)
        if not len(risk_N) or np.isnan(risk_N).any():
            return {}
        high_N = risk_N > np.median(risk_N)
        groups = {"low risk": ~high_N, "high risk": high_N}
        curves = {
            name: _curve(time_N[group_N], event_N[group_N], weight_N[group_N], max_points)
            for name, group_N in groups.items()
            if group_N.any()
        }
        return {"groups": curves}

    return Metric(add, lambda part: {}, join, lambda part: {}, lambda sums: {}, chart)


def _curve(time_N: Array, event_N: Any, weight_N: Array, max_points: int) -> dict[str, list[float]]:
    """Return the times at which the curve falls, and its value from then on; it begins with 1 at time 0."""
    time_T, index_N = np.unique(time_N, return_inverse=True)
    left_T, events_T = (np.bincount(index_N, weights=each) for each in (weight_N, weight_N * event_N))
    at_risk_T = np.cumsum(left_T[::-1])[::-1]
    falls_T = events_T > 0
    time_T, survival_T = time_T[falls_T], np.cumprod(1 - events_T[falls_T] / at_risk_T[falls_T])
    drawn = np.unique(np.linspace(0, len(time_T) - 1, min(max_points, len(time_T))).round().astype(int))
    ends = {"time": [float(time_N.max())], "survival": survival_T[-1:].tolist() or [1.0]}
    return {
        "time": [0.0, *time_T[drawn].tolist(), *ends["time"]],
        "survival": [1.0, *survival_T[drawn].tolist(), *ends["survival"]],
    }
