"""The Shapley value by guided permutations, for rounds with a gain."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from atoll.contribution.permuting import Sampling, Tolerance, Truncate, mean_marginals
from atoll.core.contribution import Contribution, Game, Utility
from atoll.core.options import Count


def gtg_shapley(
    utility: Utility = "loss",
    round_truncate: Truncate = 0.001,
    truncate: Truncate = 0.001,
    tolerance: Tolerance = 0.05,
    window: Count = 10,
    max_permutations: Count = 500,
) -> Contribution:
    """Estimate Shapley values by guided truncation: skip rounds without gain, put each client first equally often.

    (Liu et al. 2022, arXiv:2109.02053, algorithm 1.) If the utility changes by less than `round_truncate`, all values
    of the round are 0. Otherwise permutations are drawn in sweeps, in which every client is first once, followed by the
    others in random order: the first client adds most, and this removes that part of the variance. A permutation is cut
    where the remaining gain is below `truncate`. Sampling stops after a sweep if the values changed by less than
    `tolerance` over `window` permutations.
    """
    sampling = Sampling(truncate, tolerance, window, max_permutations)

    def values(game: Game, rng: np.random.Generator) -> np.ndarray:
        num = game.num_clients

        def permutations() -> Iterator[np.ndarray]:
            while True:
                for first in range(num):
                    yield np.concatenate(([first], rng.permutation(np.delete(np.arange(num), first))))

        if abs(game.value(game.all_clients) - game.value(frozenset())) < round_truncate:
            return np.zeros(num)
        return mean_marginals(game, permutations(), sampling, sweep=num)

    return Contribution(values, utility)
