"""Contribution: each client's share in the gain of a round. Shapes: C clients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import numpy as np

Coalition = frozenset[int]
"""A subset of a round's clients, by their positions 0 to C - 1 in the round."""
Utility = Literal["loss", "accuracy"]
"""Measure of a model on the server's own samples: minus its mean loss, or its accuracy."""


class Game(NamedTuple):
    """A round as a cooperative game: every coalition of its clients has a value."""

    num_clients: int
    value: Callable[[Coalition], float]
    """(coalition) -> utility of the model that its updates alone would have given; results are cached."""

    @property
    def all_clients(self) -> Coalition:
        """The coalition of all clients."""
        return frozenset(range(self.num_clients))


class Contribution(NamedTuple):
    """A rule that divides the gain of a round among its clients; values add up over rounds."""

    values: Callable[[Game, np.random.Generator], np.ndarray]
    """(round, generator) -> contribution of each client, (C,)."""
    utility: Utility
    max_clients: int | None = None
    """Maximum number of clients in a round; None: no limit."""
