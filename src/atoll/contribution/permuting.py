"""Shapley values as means over permutations, the orders in which clients join. Shapes: C clients."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Annotated, NamedTuple

import numpy as np

from atoll.core.contribution import Coalition, Game
from atoll.core.options import above, at_least

MIN_PERMUTATIONS = 30
"""Minimum number of permutations before convergence is tested."""


Truncate = Annotated[float, at_least(0, "0 is never")]
"""Remaining gain, in units of the utility, below which a permutation is cut."""
Tolerance = Annotated[float, above(0, "values never settle to the bit")]
"""Relative change of the values below which sampling stops."""


class Sampling(NamedTuple):
    """When to cut a permutation, and when to stop sampling."""

    truncate: float
    """Remaining gain below which the rest of a permutation counts as 0."""
    tolerance: float
    """Relative change of the values, over `window` permutations, below which they have converged."""
    window: int
    max_permutations: int


def mean_marginals(game: Game, permutations: Iterator[np.ndarray], sampling: Sampling, *, sweep: int = 1) -> np.ndarray:
    """Average each client's marginal gain over permutations until it converges, tested every `sweep` permutations.

    The test is sum_i |phi_i(t) - phi_i(t - window)| < tolerance sum_i |phi_i(t)|: the criterion of Ghorbani and Zou
    (2019, arXiv:1904.02868), with a ratio of sums in place of a mean of ratios, which would be 0/0 for a client that
    adds nothing.
    """
    sums_C, means = np.zeros(game.num_clients), deque[np.ndarray](maxlen=sampling.window + 1)
    for number, permutation in enumerate(permutations, 1):
        sums_C += _marginals(game, permutation, sampling.truncate)
        means.append(sums_C / number)
        if number % sweep == 0 and (
            number >= sampling.max_permutations or (number >= MIN_PERMUTATIONS and _converged(means, sampling))
        ):
            break
    return means[-1]


def _converged(means: deque[np.ndarray], sampling: Sampling) -> bool:
    if len(means) <= sampling.window:
        return False
    change, size = np.abs(means[-1] - means[0]).sum(), np.abs(means[-1]).sum()
    return bool(change < sampling.tolerance * size or size == 0)


def _marginals(game: Game, permutation: np.ndarray, truncate: float) -> np.ndarray:
    """Return each client's gain over its predecessors, (C,); 0 after the remaining gain fell below `truncate`."""
    marginals_C, total, value = np.zeros(game.num_clients), game.value(game.all_clients), game.value(frozenset())
    coalition: Coalition = frozenset()
    for client in permutation.tolist():
        if abs(total - value) < truncate:
            break
        coalition |= {client}
        before, value = value, game.value(coalition)
        marginals_C[client] = value - before
    return marginals_C
