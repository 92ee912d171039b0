"""Nearest-neighbour mixing: average neighbours before another rule."""

from __future__ import annotations

import torch
from torch import Tensor

from atoll.aggregators.columns import weighted_sums
from atoll.aggregators.geometry import BadClients, needs_updates, squared_distances
from atoll.core.aggregator import Aggregator, preprocessed
from atoll.core.options import Seed
from atoll.core.parts import Part

EXAMPLES = [
    {"f": 1, "rule": {"name": "trimmed_mean", "f": 1}},
    {"f": 1, "rule": "mean"},
    {"f": 1, "rule": "median"},
]


def nnm(f: BadClients, rule: Part, seed: Seed = 0) -> Aggregator:
    """Replace each update by the mean of the n - f updates nearest to it, itself among them, then apply `rule`.

    (Allouah et al. 2023, arXiv:2302.01772, algorithm 2.) It needs n >= 2f + 1 and what `rule` needs; with a rule such
    as trimmed_mean the error is then of the best order, f / n times the spread of the honest updates. The breakdown
    point is that of `rule`. Weights are ignored, also by `rule`.
    """
    inner: Aggregator = rule.build("aggregators", seed=seed)
    least = 2 * f + 1
    enough = least >= inner.min_updates

    def mix(updates_CD: Tensor, round_number: int) -> Tensor:
        num = len(updates_CD)
        nearest = squared_distances(updates_CD).argsort(dim=1, stable=True)[:, : num - f]
        share_CC = torch.zeros(num, num, dtype=torch.float64).scatter_(1, nearest, 1 / (num - f))
        return weighted_sums(share_CC, updates_CD)

    return preprocessed(
        mix,
        inner,
        min_updates=least if enough else inner.min_updates,
        needs=needs_updates("nnm", f, "2f + 1", least) if enough else inner.needs,
    )
