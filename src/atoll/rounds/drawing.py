"""Random draws of clients, for samplers. Shapes: N registered clients."""

from __future__ import annotations

import numpy as np

from atoll.core.sampler import Pick, Population


def draw_distinct(rng: np.random.Generator, num: int, population: Population) -> list[int]:
    """Draw `num` distinct free clients, each equally likely, or return all free ones if there are fewer.

    `free` is called only for clients that were drawn, so that a million clients cost no more than a few.
    """
    clients: list[int] = []
    tried: set[int] = set()
    while len(clients) < num and len(tried) < population.num_clients:
        num_draws = min(population.num_clients, num + 2 * len(tried))
        for client in rng.choice(population.num_clients, size=num_draws, replace=False).tolist():
            if client not in tried and len(clients) < num:
                tried.add(client)
                clients += [client] if population.free(client) else []
    return clients


def draw_weighted(
    rng: np.random.Generator, num: int, population: Population, weight_N: np.ndarray, *, replacement: bool
) -> dict[int, int]:
    """Draw `num` free clients in proportion to their weights; return the number of draws of each, in drawing order.

    A draw that is not allowed (not free, or drawn before without replacement) is repeated, which does not change the
    odds of the others. After as many draws as there are clients, the rest is drawn from a list of the allowed ones.
    """
    drawn: dict[int, int] = {}

    def allowed(client: int) -> bool:
        return (replacement or client not in drawn) and population.free(client)

    ends_N = np.cumsum(weight_N, dtype=np.float64)
    missing, tries = num, 0
    while missing > 0 and tries < population.num_clients and ends_N[-1] > 0:
        draws = np.searchsorted(ends_N, rng.random(missing) * ends_N[-1], side="right")
        tries += missing
        for client in draws.tolist():
            if allowed(client):
                drawn[client] = drawn.get(client, 0) + 1
                missing -= 1
    if missing > 0:
        allowed_N = weight_N * np.fromiter(map(allowed, range(population.num_clients)), bool, population.num_clients)
        num_allowed = int(np.count_nonzero(allowed_N))
        size = missing if replacement and num_allowed else min(missing, num_allowed)
        odds_N = allowed_N / allowed_N.sum() if num_allowed else None
        for client in rng.choice(population.num_clients, size=size, replace=replacement, p=odds_N).tolist():
            drawn[client] = drawn.get(client, 0) + 1
    return drawn


def draw_unbiased(rng: np.random.Generator, num: int, population: Population, weight_N: np.ndarray) -> list[Pick]:
    """Draw with replacement in proportion to the weights, with shares that keep the mean unbiased.

    Client k, of probability p_k and drawn count_k times, has share count_k / (p_k N). In expectation each draw then
    adds the mean over all clients to the sum over the picks (Hansen and Hurwitz 1943); if all p_k are 1 / N, the share
    is count_k.
    """
    mean = float(np.mean(weight_N))
    drawn = draw_weighted(rng, num, population, weight_N, replacement=True)
    return [Pick(client, count * mean / float(weight_N[client])) for client, count in drawn.items()]
