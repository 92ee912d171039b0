"""The Shapley value by guided orders, and only where a round gains something."""

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
    """Guided truncation: skip rounds that gain nothing, and let each client come first equally often.

    (Liu et al. 2022, arXiv:2109.02053, algorithm 1.) A round whose utility changes by less than `round_truncate` is
    worth 0 to everybody. In others, orders are drawn in sweeps in which every client comes first once, the others
    behind it at random: who comes first adds most, and that part of the variance is gone. An order is cut where what is
    left to gain is below `truncate`. After each sweep it is asked whether values changed by less than `tolerance` over
    `window` orders.
    """
    sampling = Sampling(truncate, tolerance, window, max_permutations)

    def values(game: Game, rng: np.random.Generator) -> np.ndarray:
        num = game.num_clients

        def orders() -> Iterator[np.ndarray]:
            while True:
                for first in range(num):
                    yield np.concatenate(([first], rng.permutation(np.delete(np.arange(num), first))))

        if abs(game.value(game.everybody) - game.value(frozenset())) < round_truncate:
            return np.zeros(num)
        return mean_marginals(game, orders(), sampling, sweep=num)

    return Contribution(values, utility)
