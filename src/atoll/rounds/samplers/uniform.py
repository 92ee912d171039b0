"""Uniform sampling."""

from __future__ import annotations

import numpy as np

from atoll.core.coordinator import Sampler


def uniform() -> Sampler:
    """Pick a fixed number of clients, each equally likely, without replacement."""

    def sample(rng: np.random.Generator, num: int, num_clients: int, busy: frozenset[int]) -> list[int]:
        free = num_clients - len(busy)
        drawn = rng.choice(num_clients, size=min(num, free) + len(busy), replace=False, shuffle=True)
        return [client for client in drawn.tolist() if client not in busy][: min(num, free)]

    return Sampler(sample, scheme="fixed-size without replacement")
