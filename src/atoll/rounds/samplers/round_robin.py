"""Round robin."""

from __future__ import annotations

from itertools import islice

import numpy as np

from atoll.core.coordinator import Pick, Population, Sampler


def round_robin() -> Sampler:
    """Ask clients in turn: attempt a starts at client a * num and skips who is not free; nothing is random."""

    def sample(rng: np.random.Generator, num: int, population: Population) -> list[Pick]:
        start, all_of_them = population.attempt * num, population.num_clients
        turn = ((start + step) % all_of_them for step in range(all_of_them))
        return [Pick(client) for client in islice(filter(population.free, turn), num)]

    return Sampler(sample, scheme="in turn")
