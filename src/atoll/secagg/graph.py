"""Who masks with whom: everybody with everybody in small cohorts, a random ring of k neighbours in large ones.

Degree and threshold follow from the number of clients, the drop-outs and the colluders (Bell et al. 2020, eprint
2020/704). Against a server that lies the threshold is higher, so that nobody can collect two kinds of shares.

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
SECURITY = 40
"""An input is exposed with a probability of at most 2^-40."""
CORRECTNESS = 20
"""Without more drop-outs than expected, a sum is lost with a probability of at most 2^-20."""


class Parameters(NamedTuple):
    """How many neighbours, and how many of them give a secret back."""

    num_clients: int
    degree: int
    threshold: int
    min_survivors: int
    """No sum of fewer is opened."""

    @property
    def complete(self) -> bool:
        """Whether all are neighbours; then everybody also holds a share of its own."""
        return self.degree == self.num_clients - 1


@lru_cache(maxsize=256)
def parameters(num_clients: int, dropouts: float, colluding: float, mode: Mode) -> Parameters:
    """The smallest even degree with a threshold that keeps both promises, or the complete graph.

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
    """A ring in random order, in which each client knows the K/2 before and after it."""

    parameters: Parameters
    order_N: np.ndarray
    """Who stands at a place of the ring."""
    place_N: np.ndarray
    """Where each stands."""

    def neighbours(self, index: int) -> np.ndarray:
        """The neighbours of a client in ascending order (K,)."""
        return self._rows(np.array([index])).reshape(-1)

    def table(self) -> np.ndarray:
        """The neighbours of every client (N, K), each row in ascending order."""
        return self._rows(np.arange(self.parameters.num_clients))

    def holders(self, index: int) -> np.ndarray:
        """Who holds the shares of a client, in ascending order; also whose shares it holds."""
        return np.arange(self.parameters.num_clients) if self.parameters.complete else self.neighbours(index)

    def _rows(self, indices: np.ndarray) -> np.ndarray:
        num, degree = self.parameters.num_clients, self.parameters.degree
        steps = np.arange(1, num) if self.parameters.complete else np.arange(1, degree // 2 + 1)
        if not self.parameters.complete:
            steps = np.concatenate([-steps, steps])
        return np.sort(self.order_N[(self.place_N[indices][:, None] + steps) % num], axis=1)


@lru_cache(maxsize=4)
def graph(parameters: Parameters, session: bytes, root: bytes) -> Graph:
    """Draw the ring from the session and all adverts: nobody could know it before choosing a key."""
    keys_N = np.empty(parameters.num_clients, "<u8")
    expand(hashlib.sha256(b"atoll secagg 1 graph" + session + root).digest(), keys_N)
    order_N = np.argsort(keys_N, kind="stable")
    place_N = np.empty_like(order_N)
    place_N[order_N] = np.arange(parameters.num_clients)
    return Graph(parameters, order_N, place_N)


def _complete(num_clients: int, num_colluding: int, num_left: int, mode: Mode) -> Parameters:
    """Everybody holds a share of everybody, itself included (Bonawitz et al. 2017).

    The majority, or more if colluders ask for it: against a server that lies 2t > n + colluders.
    """
    least = max(2, num_colluding + 1) if mode == "curious" else (num_clients + num_colluding) // 2 + 1
    threshold = max(least, min(num_clients // 2 + 1, num_left))
    if threshold > num_left or num_colluding >= num_clients - 1:
        raise PlanError(
            f"{num_clients} clients, of whom {num_clients - num_left} may drop out and {num_colluding} collude, cannot "
            f"sum securely against a server that is {mode}: ask more clients, or expect fewer drop-outs or colluders"
        )
    return Parameters(num_clients, num_clients - 1, threshold, threshold)


def _threshold(num_clients: int, degree: int, num_colluding: int, num_left: int, mode: Mode) -> int | None:
    """The least threshold with which this degree is secure, if so many neighbours are left."""
    each = -(SECURITY + 1) * math.log(2)  # half of what is allowed for each of the two ways to expose an input
    if _log_disconnected(num_clients, degree, num_colluding + num_clients - num_left) >= each:
        return None
    colluding_pmf = _hypergeometric(num_clients, num_colluding, degree)
    left_pmf = _hypergeometric(num_clients, num_left, degree)
    above = np.cumsum(colluding_pmf[::-1])[::-1]  # Pr[at least i neighbours collude]
    most_colluding = int(np.count_nonzero(above > math.exp(each) / num_clients)) - 1
    below = np.cumsum(left_pmf)  # Pr[at most i neighbours are left]
    least_left = int(np.count_nonzero(below < 2.0**-CORRECTNESS / num_clients))
    threshold = most_colluding + 1
    if mode == "active":  # nobody can collect two kinds of shares: 2t > k + colluders
        threshold = (degree + most_colluding) // 2 + 1
    threshold = max(threshold, 2)
    return threshold if threshold <= least_left else None


def _log_disconnected(num_clients: int, degree: int, num_gone: int) -> float:
    """Bound the log probability that the rest of the ring falls apart: k/2 in a row must be gone in two places."""
    if degree > num_gone:
        return -math.inf
    pairs = math.log(num_clients) + math.log(num_clients - degree - 1) - math.log(2)
    hit = math.lgamma(num_gone + 1) - math.lgamma(num_gone - degree + 1)
    of = math.lgamma(num_clients + 1) - math.lgamma(num_clients - degree + 1)
    return pairs + hit - of


def _hypergeometric(num_all: int, num_marked: int, num_drawn: int) -> np.ndarray:
    """Pr[i marked among those drawn], for i = 0, ..., num_drawn."""
    from scipy.special import gammaln

    def log_choose(n: int, k: np.ndarray) -> np.ndarray:
        inside = (k >= 0) & (k <= n)
        k = np.where(inside, k, 0)
        return np.where(inside, gammaln(n + 1) - gammaln(k + 1) - gammaln(n - k + 1), -np.inf)

    i = np.arange(num_drawn + 1)
    log_pmf = log_choose(num_marked, i) + log_choose(num_all - num_marked, num_drawn - i)
    return np.asarray(np.exp(log_pmf - log_choose(num_all, np.array(num_drawn))))
