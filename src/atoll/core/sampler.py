"""Sampler: how the clients of a round are chosen."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple

import numpy as np


class Population(NamedTuple):
    """The clients, as a sampler sees them."""

    num_clients: int
    """Number of registered clients."""
    free: Callable[[int], bool]
    """(client) -> whether it is idle, reachable and eligible."""
    sizes: Callable[[], np.ndarray]
    """() -> number of samples of each client, (num_clients,)."""
    scores: Mapping[int, float]
    """Last score of each client that took part."""
    attempt: int


class Pick(NamedTuple):
    """A client that gets a task, and the factor on its weight that keeps the mean unbiased."""

    client: int
    share: float = 1.0


class Sampler(NamedTuple):
    """How clients are chosen."""

    sample: Callable[[np.random.Generator, int, Population], list[Pick]]
    """(generator, number wanted, population) -> distinct clients; fewer, or none, if not enough are free."""
    scheme: str
    """Name of the sampling scheme, for privacy accounting."""
    score: Literal["", "loss", "norm"] = ""
    """Score that it needs of each client that took part: training loss, norm of the update, or none."""
    rate: float | None = None
    """Probability of each client to be chosen, in (0, 1]; None: number wanted / number of clients."""
    draws_size: bool = False
    """Whether the number of clients is random too; a commit then waits for all of them."""
    max_picks: int | None = None
    """Maximum number of clients that it can choose at a time; None for any number."""
