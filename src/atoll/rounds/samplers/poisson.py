"""Poisson sampling."""

from __future__ import annotations

from typing import Annotated

import numpy as np

from atoll.core.options import Range
from atoll.core.sampler import Pick, Population, Sampler

UNSET = "leave it out for cohort size / clients"


def poisson(rate: Annotated[float, Range(0, 1, open_low=True, hint=UNSET)] | None = None) -> Sampler:
    """Choose each free client independently with probability q (McMahan et al. 2018, arXiv:1710.06963, algorithm 1).

    q is `rate`, or the wanted number divided by the number of registered clients. The size of the cohort varies and may
    be 0.
    """

    def sample(rng: np.random.Generator, num: int, population: Population) -> list[Pick]:
        num_clients = population.num_clients
        q = min(1.0, num / num_clients) if rate is None else rate
        # A given set of size s has probability C(N, s) q^s (1-q)^(N-s) / C(N, s), that of N independent coins.
        clients = rng.choice(num_clients, size=rng.binomial(num_clients, q), replace=False)
        return [Pick(client) for client in clients.tolist() if population.free(client)]

    return Sampler(sample=sample, scheme="poisson", rate=rate, draws_size=True)
