"""Poisson sampling."""

from __future__ import annotations

from typing import Annotated

import numpy as np

from atoll.core.coordinator import Pick, Population, Sampler
from atoll.core.options import Range

UNSET = "leave it out for cohort size / clients"


def poisson(rate: Annotated[float, Range(0, 1, open_low=True, hint=UNSET)] | None = None) -> Sampler:
    """Pick each free client by itself with probability q (McMahan et al. 2018, arXiv:1710.06963, algorithm 1).

    q is `rate`, or the wanted number over the registered clients. The size of the cohort varies and may be 0.
    """

    def sample(rng: np.random.Generator, num: int, population: Population) -> list[Pick]:
        all_of_them = population.num_clients
        q = min(1.0, num / all_of_them) if rate is None else rate
        # A set of size s has probability C(N, s) q^s (1-q)^(N-s) / C(N, s): that of N coins; dropping some drops coins.
        clients = rng.choice(all_of_them, size=rng.binomial(all_of_them, q), replace=False)
        return [Pick(client) for client in clients.tolist() if population.free(client)]

    return Sampler(sample, scheme="poisson", rate=rate, draws_size=True)
