"""Predicted against true values. Shapes: N samples, L outputs."""

from __future__ import annotations

from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor

from atoll.core.messages import State
from atoll.core.metric import Metric
from atoll.core.options import Range
from atoll.metrics.forms import NUMBERS, rows
from atoll.metrics.ranking import join

TAKES = (NUMBERS,)
EXAMPLES = [{}, {"max_points": 20}]


def predicted(max_points: Annotated[int, Range(1, 100_000)] = 1000) -> Metric:
    """Draw predicted against true values of at most `max_points` samples; no figures, and nothing leaves a place.

    Kept are the points whose hashes are the smallest, so that the choice depends on the values alone, and neither on
    slices nor on their order. Weights do not show. Of several outputs each is a point.
    """

    def bounded(part: State) -> State:
        hashes = _hashes(part["true"], part["predicted"])
        chosen = torch.from_numpy(np.argsort(hashes, kind="stable")[:max_points])
        return {name: value[chosen] for name, value in part.items()}

    def add(scores: Tensor, targets: Tensor, weight_N: Tensor) -> State:
        samples = rows("predicted", TAKES, scores, targets, weight_N)
        points = {"predicted": samples.columns, "true": samples.target_columns}
        return bounded({name: value.flatten().double().cpu() for name, value in points.items()})

    def chart(part: State) -> dict[str, Any]:
        points = sorted(zip(part["true"].tolist(), part["predicted"].tolist(), strict=True))
        return {"true": [true for true, _ in points], "predicted": [guess for _, guess in points]}

    return Metric(
        add, lambda part: {}, lambda one, other: bounded(join(one, other)), lambda part: {}, lambda sums: {}, chart
    )


def _hashes(*values: Tensor) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """Return a hash of the bits of numbers at the same place (the finaliser of SplitMix64, Steele et al. 2014)."""
    mixed = np.zeros(len(values[0]), dtype=np.uint64)
    for each in values:
        mixed ^= (each + 0.0).numpy().view(np.uint64)  # + 0.0: one zero
        mixed += np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed ^= mixed >> np.uint64(31)
    return mixed
