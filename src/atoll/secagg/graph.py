"""The graph of clients that share masks: complete for small cohorts, a random ring of k neighbours for large ones.

Degree and threshold follow from the number of clients, the drop-outs and the colluders (Bell et al. 2020, eprint
2020/704). Against an active server the threshold is higher, so that it cannot collect both kinds of shares of a client.

Shapes: N clients, K neighbours of one client.
"""

from __future__ import annotations

import hashlib
import math
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from atoll.core.errors import PlanError
from atoll.secagg.masks import expand
from atoll.secagg.wire import Mode

COMPLETE_UP_TO = 64
"""Maximum number of clients of a complete graph that is used without a search."""
SECURITY = 40
"""Security parameter: an input is exposed with a probability of at most 2^-40."""
CORRECTNESS = 20
"""Correctness parameter: with no more drop-outs than planned, a sum fails with a probability of at most 2^-20."""


class Parameters(NamedTuple):
    """Degree of the graph, and the thresholds of a session."""

    num_clients: int
    degree: int
    """Number of neighbours of each client."""
    threshold: int
    """Number of shares that rebuild a secret."""
    min_survivors: int
    """Minimum number of vectors in a sum that is opened."""

    @property
    def complete(self) -> bool:
        """Whether all clients are neighbours; each then also holds a share of its own secrets."""
        return self.degree == self.num_clients - 1


@lru_cache(maxsize=256)
def parameters(num_clients: int, dropouts: float, colluding: float, mode: Mode) -> Parameters:
    """Return the smallest even degree with a threshold that meets SECURITY and CORRECTNESS, or the complete graph.

    >>> parameters(1000, 0.1, 0.1, "curious")[1:3], parameters(1000, 0.1, 0.1, "active")[1:3]
    ((48, 27), (96, 67))
    """
    num_colluding = math.floor(num_clients * colluding + 1e-9)
    num_left = math.ceil(num_clients * (1 - dropouts) - 1e-9)
    if num_clients > COMPLETE_UP_TO:
        for degree in range(2, num_clients - 1, 2):
            threshold = _threshold(num_clients, degree, num_colluding, num_left, mode)
            if threshold is not None:
                return Parameters(num_clients, degree, threshold, num_left)
    return _complete(num_clients, num_colluding, num_left, mode)


class Graph(NamedTuple):
    """A ring in random order, in which each client is a neighbour of the K/2 before and after it."""

    parameters: Parameters
    client_N: np.ndarray
    """Position on the ring -> client."""
    position_N: np.ndarray
    """Client -> its position on the ring."""

    def neighbours(self, index: int) -> np.ndarray:
        """Return the neighbours of a client in ascending order (K,)."""
        return self._rows(np.array([index])).reshape(-1)

    def table(self) -> np.ndarray:
        """Return the neighbours of every client (N, K), each row in ascending order."""
        return self._rows(np.arange(self.parameters.num_clients))

    def holders(self, index: int) -> np.ndarray:
        """Return the clients that hold shares of a client, in ascending order; it holds shares of the same ones."""
        return np.arange(self.parameters.num_clients) if self.parameters.complete else self.neighbours(index)

    def _rows(self, indices: np.ndarray) -> np.ndarray:
        num, degree = self.parameters.num_clients, self.parameters.degree
        steps = np.arange(1, num) if self.parameters.complete else np.arange(1, degree // 2 + 1)
        if not self.parameters.complete:
            steps = np.concatenate([-steps, steps])
        return np.sort(self.client_N[(self.position_N[indices][:, None] + steps) % num], axis=1)


@lru_cache(maxsize=4)
def graph(parameters: Parameters, session: bytes, root: bytes) -> Graph:
    """Draw the ring from the session and all adverts, so that it is unknown until all keys are chosen."""
    keys_N = np.empty(parameters.num_clients, "<u8")
    expand(hashlib.sha256(b"atoll secagg 1 graph" + session + root).digest(), keys_N)
    client_N = np.argsort(keys_N, kind="stable")
    position_N = np.empty_like(client_N)
    position_N[client_N] = np.arange(parameters.num_clients)
    return Graph(parameters, client_N, position_N)


def _complete(num_clients: int, num_colluding: int, num_left: int, mode: Mode) -> Parameters:
    """Return the complete graph, in which each client holds a share of every client (Bonawitz et al. 2017).

    The threshold t is a majority, or more if the colluders require it; against an active server 2t > n + colluders.
    """
    least = max(2, num_colluding + 1) if mode == "curious" else (num_clients + num_colluding) // 2 + 1
    threshold = max(least, min(num_clients // 2 + 1, num_left))
    if threshold > num_left or num_colluding >= num_clients - 1:
        raise PlanError(
            f"{num_clients} clients, of which {num_clients - num_left} may drop out and {num_colluding} collude, "
            f"cannot sum securely against a server that is {mode}: ask more clients, or plan for fewer drop-outs or "
            "colluders"
        )
    return Parameters(num_clients, num_clients - 1, threshold, threshold)


def _threshold(num_clients: int, degree: int, num_colluding: int, num_left: int, mode: Mode) -> int | None:
    """Return the least threshold with which this degree is secure and correct; None if there is none."""
    log_limit = -(SECURITY + 1) * math.log(2)  # each of the two ways to expose an input gets half of 2^-SECURITY
    if _log_disconnected(num_clients, degree, num_colluding + num_clients - num_left) >= log_limit:
        return None
    colluding_pmf = _hypergeometric(num_clients, num_colluding, degree)
    left_pmf = _hypergeometric(num_clients, num_left, degree)
    above = np.cumsum(colluding_pmf[::-1])[::-1]  # Pr[at least i neighbours collude]
    most_colluding = int(np.count_nonzero(above > math.exp(log_limit) / num_clients)) - 1
    below = np.cumsum(left_pmf)  # Pr[at most i neighbours are left]
    least_left = int(np.count_nonzero(below < 2.0**-CORRECTNESS / num_clients))
    threshold = most_colluding + 1
    if mode == "active":  # the server cannot collect both kinds of shares: 2t > k + colluders
        threshold = (degree + most_colluding) // 2 + 1
    threshold = max(threshold, 2)
    return threshold if threshold <= least_left else None


def _log_disconnected(num_clients: int, degree: int, num_gone: int) -> float:
    """Bound the log probability that the rest of the ring is disconnected: k/2 in a row are gone in two places."""
    if degree > num_gone:
        return -math.inf
    pairs = math.log(num_clients) + math.log(num_clients - degree - 1) - math.log(2)
    all_gone = math.lgamma(num_gone + 1) - math.lgamma(num_gone - degree + 1)
    total = math.lgamma(num_clients + 1) - math.lgamma(num_clients - degree + 1)
    return pairs + all_gone - total


def _hypergeometric(num_all: int, num_marked: int, num_drawn: int) -> np.ndarray:
    """Return Pr[i of the drawn are marked] for i = 0, ..., num_drawn."""
    from scipy.special import gammaln

    def log_choose(n: int, k: np.ndarray) -> np.ndarray:
        inside = (k >= 0) & (k <= n)
        k = np.where(inside, k, 0)
        return np.where(inside, gammaln(n + 1) - gammaln(k + 1) - gammaln(n - k + 1), -np.inf)

    i = np.arange(num_drawn + 1)
    log_pmf = log_choose(num_marked, i) + log_choose(num_all - num_marked, num_drawn - i)
    return np.asarray(np.exp(log_pmf - log_choose(num_all, np.array(num_drawn))))
