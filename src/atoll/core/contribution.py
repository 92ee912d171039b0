"""Contribution: how much of what a round gained is owed to each of its clients. Shapes: C clients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import numpy as np

Coalition = frozenset[int]
"""Some of a round's clients, by their places 0 to C - 1."""
Utility = Literal["loss", "accuracy"]
"""What a model is worth on the server's own samples: minus its mean loss, or its accuracy."""


class Game(NamedTuple):
    """A round, as a game: every coalition of its clients has a value."""

    num_clients: int
    value: Callable[[Coalition], float]
    """A coalition -> what the model is worth that it would have made alone; asking twice costs nothing."""

    @property
    def everybody(self) -> Coalition:
        """The coalition of all."""
        return frozenset(range(self.num_clients))


class Contribution(NamedTuple):
    """How the gain of a round is shared out to its clients; values add up over the rounds."""

    values: Callable[[Game, np.random.Generator], np.ndarray]
    """A round, and its randomness -> what each client added to it, (C,)."""
    utility: Utility
    max_clients: int | None = None
    """The most clients a round for which this can be computed."""
