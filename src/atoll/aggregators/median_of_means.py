"""The coordinate-wise median of the means of groups."""

from __future__ import annotations

from torch import Tensor

from atoll.aggregators.columns import weighted_sums
from atoll.aggregators.geometry import BadClients, needs_updates
from atoll.aggregators.grouping import group_shares
from atoll.aggregators.median import median
from atoll.core.aggregator import Aggregator, preprocessed
from atoll.core.errors import PlanError
from atoll.core.options import Count, Seed

EXAMPLES = [{"f": 1}, {"f": 2}]


def median_of_means(f: BadClients, num_groups: Count | None = None, seed: Seed = 0) -> Aggregator:
    """Average random groups, drawn anew in each round, and take the median of their means in each coordinate.

    (Chen et al. 2017, arXiv:1705.05491, algorithm 2, which takes the geometric median of the means: that is bucketing
    with geometric_median.) By default there are 2f + 1 groups, so that the majority holds honest clients only. It
    needs n >= 2f + 1; breakdown point f / n, below 1/2. Weights are ignored.
    """
    least = 2 * f + 1
    groups = least if num_groups is None else num_groups
    if groups < least:
        raise PlanError(
            f"median_of_means with f = {f} needs more than 2f groups: got num_groups = {num_groups}; "
            f"set it to at least {least}, or leave it out"
        )

    def group_means(updates_CD: Tensor, round_number: int) -> Tensor:
        return weighted_sums(group_shares(len(updates_CD), groups, seed, round_number), updates_CD)

    needs = needs_updates("median_of_means", f, "2f + 1" if groups == least else "num_groups", groups)
    return preprocessed(group_means, median(), min_updates=groups, needs=needs)._replace(order_sensitive=True)
