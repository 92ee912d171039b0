"""Uniform sampling."""

from __future__ import annotations

import numpy as np

from atoll.core.coordinator import Pick, Population, Sampler
from atoll.rounds.drawing import different, unbiased


def uniform(replacement: bool = False) -> Sampler:
    """Pick a fixed number of clients, each equally likely (McMahan et al. 2017, arXiv:1602.05629, algorithm 1).

    With `replacement` so many draws are made; a client drawn twice is asked once and counts twice.
    """

    def sample(rng: np.random.Generator, num: int, population: Population) -> list[Pick]:
        if replacement:
            return unbiased(rng, num, population, np.ones(population.num_clients))
        return [Pick(client) for client in different(rng, num, population)]

    return Sampler(sample, scheme=f"fixed-size {'with' if replacement else 'without'} replacement")
