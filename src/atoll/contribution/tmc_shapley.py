"""The Shapley value by random orders that are cut short."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from atoll.contribution.permuting import Sampling, Tolerance, Truncate, mean_marginals
from atoll.core.contribution import Contribution, Game, Utility
from atoll.core.options import Count


def tmc_shapley(
    utility: Utility = "loss",
    truncate: Truncate = 0.001,
    tolerance: Tolerance = 0.05,
    window: Count = 100,
    max_permutations: Count = 500,
) -> Contribution:
    """Average what clients add as they join in random orders (Ghorbani and Zou 2019, arXiv:1904.02868, algorithm 1).

    An order is cut where what is left to gain is below `truncate`. The paper values samples and sets that level by the
    bootstrap; here it is in units of the utility. Orders are drawn until values change by less than `tolerance` over
    `window` of them, the paper's 0.05 and 100.
    """
    sampling = Sampling(truncate, tolerance, window, max_permutations)

    def values(game: Game, rng: np.random.Generator) -> np.ndarray:
        def orders() -> Iterator[np.ndarray]:
            while True:
                yield rng.permutation(game.num_clients)

        return mean_marginals(game, orders(), sampling)

    return Contribution(values, utility)
