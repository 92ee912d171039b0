"""Power of choice."""

from __future__ import annotations

import math

import numpy as np

from atoll.core.options import Count
from atoll.core.sampler import Pick, Population, Sampler
from atoll.rounds.drawing import draw_weighted


def power_of_choice(candidates: Count | None = None) -> Sampler:
    """Choose the clients with the largest loss among d candidates drawn by n_k (Cho et al. 2020, rpow-d).

    arXiv:2010.01243: candidates are drawn without replacement; the loss is that of a client's last round, and infinite
    if it never took part. d is `candidates`, or twice the number wanted. The mean is biased towards high losses by
    design.
    """

    def sample(rng: np.random.Generator, num: int, population: Population) -> list[Pick]:
        d = 2 * num if candidates is None else candidates
        drawn = draw_weighted(rng, d, population, population.sizes(), replacement=False)
        by_loss = sorted(drawn, key=lambda client: population.scores.get(client, math.inf), reverse=True)
        return [Pick(client) for client in by_loss[:num]]

    return Sampler(sample=sample, scheme="by loss without replacement", score="loss", max_picks=candidates)
