"""The Shapley value by truncated random permutations."""

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
    """Estimate Shapley values by random permutations (Ghorbani and Zou 2019, arXiv:1904.02868, algorithm 1).

    A permutation is cut where the remaining gain is below `truncate`. The paper values samples and sets that level by
    the bootstrap; here it is in units of the utility. Sampling stops when the values change by less than `tolerance`
    over `window` permutations, in the paper 0.05 and 100.
    """
    sampling = Sampling(truncate, tolerance, window, max_permutations)

    def values(game: Game, rng: np.random.Generator) -> np.ndarray:
        def permutations() -> Iterator[np.ndarray]:
            while True:
                yield rng.permutation(game.num_clients)

        return mean_marginals(game, permutations(), sampling)

    return Contribution(values, utility)
