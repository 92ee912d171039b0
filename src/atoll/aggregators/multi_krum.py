"""Multi-Krum."""

from __future__ import annotations

import torch
from torch import Tensor

from atoll.aggregators.columns import weighted_sum
from atoll.aggregators.geometry import BadClients, needs_updates, rank_by_krum, squared_distances
from atoll.core.aggregator import Aggregator, stacked
from atoll.core.options import Count

EXAMPLES = [{"f": 1}, {"f": 2}]


def multi_krum(f: BadClients, num_selected: Count | None = None) -> Aggregator:
    """Average the `num_selected` updates with the best Krum scores, by default n - f - 2; ignore weights.

    (Blanchard et al. 2017, arXiv:1703.02757, section 4, end.) It needs n >= 2f + 3; breakdown point (n - 3) / 2n.
    `num_selected` is cut to n - f: more would include bad updates.
    """
    least = 2 * f + 3

    def rule(updates_CD: Tensor, weight_C: Tensor) -> Tensor:
        num = len(updates_CD)
        kept = min(num_selected or num - f - 2, num - f)
        best = rank_by_krum(squared_distances(updates_CD), f)[:kept]
        share_C = torch.zeros(num, dtype=torch.float64)
        share_C[best] = 1 / kept
        return weighted_sum(share_C, updates_CD)

    return stacked(
        rule,
        min_updates=least,
        needs=needs_updates("multi_krum", f, "2f + 3", least),
        rotation_equivariant=True,
        translation_equivariant=True,
        bounded=True,
    )
