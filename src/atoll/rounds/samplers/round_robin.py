"""Round robin."""

from __future__ import annotations

from itertools import islice

import numpy as np

from atoll.core.sampler import Pick, Population, Sampler


def round_robin() -> Sampler:
    """Choose clients in turn: attempt a starts at client a * num and skips those that are not free; not random."""

    def sample(rng: np.random.Generator, num: int, population: Population) -> list[Pick]:
        start, num_clients = population.attempt * num, population.num_clients
        in_turn = ((start + step) % num_clients for step in range(num_clients))
        return [Pick(client) for client in islice(filter(population.free, in_turn), num)]

    return Sampler(sample=sample, scheme="in turn")
