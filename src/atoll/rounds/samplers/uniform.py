"""Uniform sampling."""

from __future__ import annotations

import numpy as np

from atoll.core.coordinator import Pick, Population, Sampler
from atoll.rounds.drawing import different


def uniform() -> Sampler:
    """Pick a fixed number of clients, each equally likely, without replacement."""

    def sample(rng: np.random.Generator, num: int, population: Population) -> list[Pick]:
        return [Pick(client) for client in different(rng, num, population)]

    return Sampler(sample, scheme="fixed-size without replacement")
