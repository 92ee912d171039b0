"""The coordinate-wise median."""

from __future__ import annotations

from torch import Tensor

from atoll.aggregators.columns import Array, reduce_sorted_columns
from atoll.core.aggregator import Aggregator, stacked


def median() -> Aggregator:
    """Take the median of each coordinate and ignore weights (Yin et al. 2018, arXiv:1803.01498, definition 1).

    For an even number of clients it is the mean of the two middle values. Breakdown point 1/2: with f < n/2 bad clients
    every coordinate lies within the range of the honest ones.
    """

    def middle(sorted_BC: Array) -> Array:
        num = sorted_BC.shape[1]
        median_B: Array = sorted_BC[:, (num - 1) // 2] / 2 + sorted_BC[:, num // 2] / 2  # halved first: no overflow
        return median_B

    def rule(updates_CD: Tensor, weight_C: Tensor) -> Tensor:
        return reduce_sorted_columns(updates_CD, middle)

    return stacked(rule, translation_equivariant=True, bounded=True)
