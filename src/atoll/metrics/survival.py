"""Parts of survival metrics: risks, times and events of every sample. Shapes: N samples."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from atoll.core.messages import State
from atoll.metrics.counts import Array
from atoll.metrics.forms import RISKS, rows
from atoll.metrics.ranking import keep

TAKES = (RISKS,)


def survival_part(name: str, scores: Tensor, targets: Tensor, weight_N: Tensor) -> State:
    """Return the part of samples, which merges by concatenation."""
    samples = rows(name, TAKES, scores, targets, weight_N)
    time_N, event_N = samples.targets.unbind(1)
    return keep(risk=samples.scores, time=time_N, event=event_N, weight=samples.weight_N)


def survival_arrays(part: State) -> tuple[Array, Array, Any, Array]:
    """Return risks, times, whether an event was seen, and weights, in float64."""
    risk_N, time_N, event_N, weight_N = (
        part[name].double().cpu().numpy() for name in ("risk", "time", "event", "weight")
    )
    return risk_N, time_N, event_N == 1, weight_N


def order_of(time_N: Array, event_N: Any) -> Array:
    """Return whole numbers in the order of times; at one time events come before those who are censored."""
    rank_N: Array = np.unique(time_N, return_inverse=True)[1]
    return np.where(event_N, 2 * rank_N, 2 * rank_N + 1)
