"""The coordinate-wise trimmed mean."""

from __future__ import annotations

from torch import Tensor

from atoll.aggregators.columns import Array, reduce_sorted_columns
from atoll.aggregators.geometry import BadClients, needs_updates
from atoll.core.aggregator import Aggregator, stacked

EXAMPLES = [{"f": 1}, {"f": 2}]


def trimmed_mean(f: BadClients) -> Aggregator:
    """Drop the f smallest and the f largest values of each coordinate and average the rest; ignore weights.

    (Yin et al. 2018, arXiv:1803.01498, definition 2, with beta = f / n.) It needs n >= 2f + 1; breakdown point f / n,
    below 1/2: every coordinate lies within the range of the honest ones.
    """
    least = 2 * f + 1

    def inner_mean(sorted_BC: Array) -> Array:
        mean_B: Array = sorted_BC[:, f : sorted_BC.shape[1] - f].mean(axis=1)
        return mean_B

    def rule(updates_CD: Tensor, weight_C: Tensor) -> Tensor:
        return reduce_sorted_columns(updates_CD, inner_mean)

    return stacked(
        rule,
        min_updates=least,
        needs=needs_updates("trimmed_mean", f, "2f + 1", least),
        translation_equivariant=True,
        bounded=True,
    )
