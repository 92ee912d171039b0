"""Power of choice."""

from __future__ import annotations

import math

import numpy as np

from atoll.core.coordinator import Pick, Population, Sampler
from atoll.core.options import Count
from atoll.rounds.drawing import by_weight


def power_of_choice(candidates: Count | None = None) -> Sampler:
    """Of d candidates drawn by n_k without replacement, pick those with the largest loss (Cho et al. 2020, rpow-d).

    arXiv:2010.01243: the loss is that of a client's last round, and infinite if it never took part. d is `candidates`,
    or twice the number that is asked. Biased by design towards high losses: nothing makes up for it.
    """

    def sample(rng: np.random.Generator, num: int, population: Population) -> list[Pick]:
        d = 2 * num if candidates is None else candidates
        drawn = by_weight(rng, d, population, population.sizes(), replacement=False)
        worst = sorted(drawn, key=lambda client: population.scores.get(client, math.inf), reverse=True)
        return [Pick(client) for client in worst[:num]]

    return Sampler(sample, scheme="by loss without replacement", score="loss", most=candidates)
