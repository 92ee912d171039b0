"""Krum."""

from __future__ import annotations

from torch import Tensor

from atoll.aggregators.geometry import BadClients, needs_updates, rank_by_krum, squared_distances
from atoll.core.aggregator import Aggregator, stacked

EXAMPLES = [{"f": 1}, {"f": 2}]


def krum(f: BadClients) -> Aggregator:
    """Return the one update that is closest to its neighbours; ignore weights.

        argmin_i  sum over the n - f - 2 updates j nearest to i of |x_i - x_j|^2

    (Blanchard et al. 2017, arXiv:1703.02757, section 4.) It needs n >= 2f + 3; breakdown point (n - 3) / 2n, below 1/2.
    """
    least = 2 * f + 3

    def rule(updates_CD: Tensor, weight_C: Tensor) -> Tensor:
        return updates_CD[rank_by_krum(squared_distances(updates_CD), f)[0]].clone()

    return stacked(
        rule,
        min_updates=least,
        needs=needs_updates("krum", f, "2f + 3", least),
        rotation_equivariant=True,
        translation_equivariant=True,
        bounded=True,
    )
