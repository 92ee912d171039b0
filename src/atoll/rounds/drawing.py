"""What samplers share."""

from __future__ import annotations

import numpy as np

from atoll.core.coordinator import Population


def different(rng: np.random.Generator, num: int, population: Population) -> list[int]:
    """So many different free clients, each equally likely, or all that are free if they are fewer.

    Clients are drawn before it is asked whether they are free, so that a million clients cost no more than a few.
    """
    found: list[int] = []
    seen: set[int] = set()
    while len(found) < num and len(seen) < population.num_clients:
        ahead = min(population.num_clients, num + 2 * len(seen))
        for client in rng.choice(population.num_clients, size=ahead, replace=False).tolist():
            if client not in seen and len(found) < num:
                seen.add(client)
                found += [client] if population.free(client) else []
    return found
