"""Sampling by the number of samples."""

from __future__ import annotations

import numpy as np

from atoll.core.sampler import Pick, Population, Sampler
from atoll.rounds.drawing import draw_unbiased


def weighted() -> Sampler:
    """Draw clients by n_k with replacement, and keep the mean unbiased (Li et al. 2020, arXiv:1907.02189, scheme I).

    Shares are proportional to count_k / n_k: an update of weight n_k counts once for each draw, as in the paper.
    """

    def sample(rng: np.random.Generator, num: int, population: Population) -> list[Pick]:
        return draw_unbiased(rng, num, population, population.sizes())

    return Sampler(sample=sample, scheme="by size with replacement")
