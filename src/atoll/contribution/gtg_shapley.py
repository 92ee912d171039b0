"""The Shapley value by guided orders, and only where a round gains something."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from atoll.contribution.permuting import Sampling, checked_sampling, mean_marginals
from atoll.core.contribution import Contribution, Game, checked_utility
from atoll.core.errors import PlanError


def gtg_shapley(
    utility: str = "loss",
    round_truncate: float = 0.001,
    truncate: float = 0.001,
    tolerance: float = 0.05,
    window: int = 10,
    max_permutations: int = 500,
) -> Contribution:
    """Guided truncation: skip rounds that gain nothing, and let each client come first equally often.

    (Liu et al. 2022, arXiv:2109.02053, algorithm 1.) A round whose utility changes by less than `round_truncate` is
    worth 0 to everybody. In others, orders are drawn in sweeps in which every client comes first once, the others
    behind it at random: who comes first adds most, and that part of the variance is gone. An order is cut where what is
    left to gain is below `truncate`. After each sweep it is asked whether values changed by less than `tolerance` over
    `window` orders.
    """
    sampling = checked_sampling("gtg_shapley", Sampling(truncate, tolerance, window, max_permutations))
    if round_truncate < 0:
        raise PlanError(f"gtg_shapley.round_truncate must be 0 (never) or more, got {round_truncate}")

    def values(game: Game, rng: np.random.Generator) -> np.ndarray:
        num = game.num_clients

        def orders() -> Iterator[np.ndarray]:
            while True:
                for first in range(num):
                    yield np.concatenate(([first], rng.permutation(np.delete(np.arange(num), first))))

        if abs(game.value(game.everybody) - game.value(frozenset())) < round_truncate:
            return np.zeros(num)
        return mean_marginals(game, orders(), sampling, sweep=num)

    return Contribution(values, checked_utility("gtg_shapley", utility))
