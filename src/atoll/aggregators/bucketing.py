"""Random buckets, before another rule."""

from __future__ import annotations

from typing import Annotated

from torch import Tensor

from atoll.aggregators.columns import mixed
from atoll.aggregators.grouping import group_shares
from atoll.core.aggregator import Aggregator, prepared
from atoll.core.options import Seed, at_least
from atoll.core.parts import Part

EXAMPLES = [{"rule": "median"}, {"rule": {"name": "krum", "f": 1}}]


def bucketing(
    rule: Part, size: Annotated[int, at_least(1, "2 is what its authors advise")] = 2, seed: Seed = 0
) -> Aggregator:
    """Put the updates into random buckets of `size`, anew in each round, and apply `rule` to the means of the buckets.

    (Karimireddy et al. 2022, arXiv:2006.09365, algorithm 1.) There are n / size buckets, rounded up, of which f bad
    clients spoil at most f: give `rule` the f of the clients. It needs (m - 1) size + 1 updates, where `rule` needs m;
    the breakdown point is that of `rule` divided by `size`. Weights are ignored, also by `rule`.
    """
    inner: Aggregator = rule.build("aggregators", seed=seed)
    least = (inner.min_updates - 1) * size + 1

    def means(updates_CD: Tensor, number: int) -> Tensor:
        num = len(updates_CD)
        return mixed(group_shares(num, -(-num // size), seed, number), updates_CD)

    needs = f"{inner.needs}, which are {least} in buckets of {size}"
    return prepared(means, inner, min_updates=least, needs=needs)._replace(order_sensitive=True)
