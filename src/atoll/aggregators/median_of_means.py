"""The coordinate-wise median of the means of groups."""

from __future__ import annotations

from torch import Tensor

from atoll.aggregators.columns import mixed
from atoll.aggregators.geometry import BadClients, at_least
from atoll.aggregators.grouping import group_shares
from atoll.aggregators.median import median
from atoll.core.aggregator import Aggregator, prepared
from atoll.core.errors import PlanError
from atoll.core.options import Count, Seed

EXAMPLES = [{"f": 1}, {"f": 2}]


def median_of_means(f: BadClients, num_groups: Count | None = None, seed: Seed = 0) -> Aggregator:
    """Average random groups, drawn anew in each round, and take the median of their means in each coordinate.

    (Chen et al. 2017, arXiv:1705.05491, algorithm 2, which takes the geometric median of the means: that is bucketing
    with geometric_median.) There are 2f + 1 groups unless said otherwise, so that most hold honest clients only. It
    needs n >= 2f + 1; breakdown point f / n, below 1/2. Weights are ignored.
    """
    least = 2 * f + 1
    groups = least if num_groups is None else num_groups
    if groups < least:
        raise PlanError(f"median_of_means needs more than 2f groups for f = {f}: set num_groups to at least {least}")

    def means(updates_CD: Tensor, number: int) -> Tensor:
        return mixed(group_shares(len(updates_CD), groups, seed, number), updates_CD)

    needs = at_least("median_of_means", f, "2f + 1" if groups == least else "num_groups", groups)
    return prepared(means, median(), min_updates=groups, needs=needs)._replace(order_sensitive=True)
