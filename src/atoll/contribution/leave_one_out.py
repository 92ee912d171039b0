"""The leave-one-out value."""

from __future__ import annotations

import numpy as np

from atoll.core.contribution import Contribution, Game, Utility


def leave_one_out(utility: Utility = "loss") -> Contribution:
    """Measure what a round loses without a client: v(all) - v(all but i), by C + 1 evaluations.

    Values need not add up to the round's gain, and clients that can replace each other get a value of 0.
    """

    def values(game: Game, rng: np.random.Generator) -> np.ndarray:
        clients, total = game.all_clients, game.value(game.all_clients)
        return np.array([total - game.value(clients - {client}) for client in range(game.num_clients)])

    return Contribution(values, utility)
