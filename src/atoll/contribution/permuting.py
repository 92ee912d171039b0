"""Shapley values as means over orders in which clients join. Shapes: C clients."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Annotated, NamedTuple

import numpy as np

from atoll.core.contribution import Coalition, Game
from atoll.core.options import above, at_least

LEAST = 30
"""So many orders are tried before anything is called settled."""


Truncate = Annotated[float, at_least(0, "0 is never")]
Tolerance = Annotated[float, above(0, "values never settle to the bit")]


class Sampling(NamedTuple):
    """How long orders are tried, and when the rest of one is not looked at."""

    truncate: float
    """Once a coalition is worth as much as everybody up to this, those who join later add nothing."""
    tolerance: float
    """The values have settled if they changed by less than this share..."""
    window: int
    """...over so many orders."""
    max_permutations: int


def mean_marginals(game: Game, orders: Iterator[np.ndarray], sampling: Sampling, *, sweep: int = 1) -> np.ndarray:
    """The mean of what each client adds as it joins, over orders until it settles; looked at every `sweep` orders.

    Settled is sum_i |phi_i(t) - phi_i(t - window)| < tolerance sum_i |phi_i(t)|: the criterion of Ghorbani and Zou
    (2019, arXiv:1904.02868), with a ratio of sums in place of a mean of ratios, which 0/0 would spoil for a client that
    adds nothing.
    """
    sums_C, means = np.zeros(game.num_clients), deque[np.ndarray](maxlen=sampling.window + 1)
    for number, order in enumerate(orders, 1):
        sums_C += _marginals(game, order, sampling.truncate)
        means.append(sums_C / number)
        if number % sweep == 0 and (
            number >= sampling.max_permutations or (number >= LEAST and _settled(means, sampling))
        ):
            break
    return means[-1]


def _settled(means: deque[np.ndarray], sampling: Sampling) -> bool:
    if len(means) <= sampling.window:
        return False
    change, size = np.abs(means[-1] - means[0]).sum(), np.abs(means[-1]).sum()
    return bool(change < sampling.tolerance * size or size == 0)


def _marginals(game: Game, order: np.ndarray, truncate: float) -> np.ndarray:
    """What each client adds to those before it in an order, which ends early once nothing is left to add."""
    found_C, whole, so_far = np.zeros(game.num_clients), game.value(game.everybody), game.value(frozenset())
    joined: Coalition = frozenset()
    for client in order.tolist():
        if abs(whole - so_far) < truncate:
            break
        joined |= {client}
        before, so_far = so_far, game.value(joined)
        found_C[client] = so_far - before
    return found_C
