"""Bucketing: average random buckets of updates before another rule."""

from __future__ import annotations

from typing import Annotated

from torch import Tensor

from atoll.aggregators.columns import weighted_sums
from atoll.aggregators.grouping import group_shares
from atoll.core.aggregator import Aggregator, preprocessed
from atoll.core.options import Seed, at_least
from atoll.core.parts import Part

EXAMPLES = [{"rule": "median"}, {"rule": {"name": "krum", "f": 1}}]


def bucketing(
    rule: Part, size: Annotated[int, at_least(1, "2 is what its authors advise")] = 2, seed: Seed = 0
) -> Aggregator:
    """Average random buckets of `size` updates, drawn anew in each round, and apply `rule` to the means.

    (Karimireddy et al. 2022, arXiv:2006.09365, algorithm 1.) There are n / size buckets, rounded up; f bad clients
    affect at most f of them, so give `rule` the same f. It needs (m - 1) size + 1 updates, where `rule` needs m; the
    breakdown point is that of `rule` divided by `size`. Weights are ignored, also by `rule`.
    """
    inner: Aggregator = rule.build("aggregators", seed=seed)
    least = (inner.min_updates - 1) * size + 1

    def bucket_means(updates_CD: Tensor, round_number: int) -> Tensor:
        num = len(updates_CD)
        return weighted_sums(group_shares(num, -(-num // size), seed, round_number), updates_CD)

    needs = f"{inner.needs}, which takes {least} in buckets of {size}"
    return preprocessed(bucket_means, inner, min_updates=least, needs=needs)._replace(order_sensitive=True)
