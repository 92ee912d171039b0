"""Uniform sampling."""

from __future__ import annotations

import numpy as np

from atoll.core.sampler import Pick, Population, Sampler
from atoll.rounds.drawing import draw_distinct, draw_unbiased


def uniform(replacement: bool = False) -> Sampler:
    """Choose a fixed number of clients, each equally likely (McMahan et al. 2017, arXiv:1602.05629, algorithm 1).

    With `replacement` the number of draws is fixed; a client drawn twice trains once and counts twice.
    """

    def sample(rng: np.random.Generator, num: int, population: Population) -> list[Pick]:
        if replacement:
            return draw_unbiased(rng, num, population, np.ones(population.num_clients))
        return [Pick(client) for client in draw_distinct(rng, num, population)]

    return Sampler(sample=sample, scheme=f"fixed-size {'with' if replacement else 'without'} replacement")
