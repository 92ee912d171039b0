"""Sampling by the number of samples."""

from __future__ import annotations

import numpy as np

from atoll.core.coordinator import Pick, Population, Sampler
from atoll.rounds.drawing import unbiased


def weighted() -> Sampler:
    """Draw clients by n_k with replacement, and make up for it (Li et al. 2020, arXiv:1907.02189, scheme I).

    Shares are in proportion to count_k / n_k: an update of weight n_k counts once for each draw, as in the paper.
    """

    def sample(rng: np.random.Generator, num: int, population: Population) -> list[Pick]:
        return unbiased(rng, num, population, population.sizes())

    return Sampler(sample, scheme="by size with replacement")
