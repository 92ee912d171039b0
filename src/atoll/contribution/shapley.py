"""The exact Shapley value."""

from __future__ import annotations

from itertools import combinations
from math import comb

import numpy as np

from atoll.core.contribution import Contribution, Game, Utility

MAX_CLIENTS = 10
"""Maximum number of clients: each one doubles the work, and 10 clients have 1,024 coalitions."""


def shapley(utility: Utility = "loss") -> Contribution:
    """Divide a round's gain by the only rule that is efficient, symmetric and additive and gives null players 0.

        phi_i = sum over S without i of (v(S + i) - v(S)) / (C binom(C - 1, |S|))

    (Shapley 1953; Ghorbani and Zou 2019, arXiv:1904.02868, equation 1; added up over rounds it is the federated Shapley
    value of Wang et al. 2020, arXiv:2009.06192.) It takes all 2^C coalitions.
    """

    def values(game: Game, rng: np.random.Generator) -> np.ndarray:
        num = game.num_clients
        values_C = np.zeros(num)
        for client in range(num):
            others = [other for other in range(num) if other != client]
            for size in range(num):
                gains = [
                    game.value(frozenset((*coalition, client))) - game.value(frozenset(coalition))
                    for coalition in combinations(others, size)
                ]
                values_C[client] += sum(gains) / (num * comb(num - 1, size))
        return values_C

    return Contribution(values, utility, max_clients=MAX_CLIENTS)
