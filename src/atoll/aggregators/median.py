"""The coordinate-wise median."""

from __future__ import annotations

from torch import Tensor

from atoll.core.aggregator import Aggregator, stacked


def median() -> Aggregator:
    """Take the median of each coordinate, weights aside (Yin et al. 2018, arXiv:1803.01498, definition 1).

    For an even number of clients it is the mean of the two middle values.
    """

    def rule(updates_CD: Tensor, weight_C: Tensor) -> Tensor:
        num = updates_CD.shape[0]
        sorted_CD = updates_CD.sort(dim=0).values
        return (sorted_CD[(num - 1) // 2] + sorted_CD[num // 2]) / 2

    return stacked(rule)
