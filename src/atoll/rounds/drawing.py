"""What samplers share. Shapes: N registered clients."""

from __future__ import annotations

import numpy as np

from atoll.core.coordinator import Pick, Population


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


def by_weight(
    rng: np.random.Generator, num: int, population: Population, weight_N: np.ndarray, *, replacement: bool
) -> dict[int, int]:
    """Draw so many free clients in proportion to their weights: how often each was drawn, in the order of first draws.

    A draw that does not count (not free, or not put back) is made again, which leaves the odds of the others as they
    were. After as many draws as there are clients, those who still can be drawn are listed instead.
    """
    drawn: dict[int, int] = {}

    def counts(client: int) -> bool:
        return (replacement or client not in drawn) and population.free(client)

    ends_N = np.cumsum(weight_N, dtype=np.float64)
    left, tries = num, 0
    while left > 0 and tries < population.num_clients and ends_N[-1] > 0:
        places = np.searchsorted(ends_N, rng.random(left) * ends_N[-1], side="right")
        tries += left
        for client in places.tolist():
            if counts(client):
                drawn[client] = drawn.get(client, 0) + 1
                left -= 1
    if left > 0:
        left_N = weight_N * np.fromiter(map(counts, range(population.num_clients)), bool, population.num_clients)
        num_left = int(np.count_nonzero(left_N))
        size = left if replacement and num_left else min(left, num_left)
        odds_N = left_N / left_N.sum() if num_left else None
        for client in rng.choice(population.num_clients, size=size, replace=replacement, p=odds_N).tolist():
            drawn[client] = drawn.get(client, 0) + 1
    return drawn


def unbiased(rng: np.random.Generator, num: int, population: Population, weight_N: np.ndarray) -> list[Pick]:
    """Draw with replacement in proportion to the weights, with shares that make up for it.

    Client k, of probability p_k and drawn count_k times, has share count_k / (p_k N). A draw then adds to a sum over
    the picks, on average, the mean over all clients (Hansen and Hurwitz 1943); where all p_k are 1 / N, it counts 1.
    """
    mean = float(np.mean(weight_N))
    drawn = by_weight(rng, num, population, weight_N, replacement=True)
    return [Pick(client, count * mean / float(weight_N[client])) for client, count in drawn.items()]
