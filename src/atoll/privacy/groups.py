"""Groups of clients by sampling rate and steps, so that each client is accounted for by its own numbers.

Shapes: C clients.
"""

from __future__ import annotations

import numpy as np

from atoll.core.privacy import Draws

EXACT = 8
"""Maximum number of groups that are kept exactly; of more, neighbours are joined."""
NEAR, FAR = 1.02, 0.9
"""Factors that bound the steps of joined clients: 1.02, or 0.9 times the ratio of the largest rate to theirs."""


def most_exposed(rate_C: np.ndarray, steps_C: np.ndarray) -> tuple[Draws, ...]:
    """Return the Pareto front of clients in rate and steps; the client with the largest epsilon is among them.

    Epsilon grows with the rate and with the steps, so that a client can be skipped if another has at least as much of
    both.

    >>> most_exposed(np.array([0.5, 0.1, 0.1]), np.array([2, 10, 3]))
    (Draws(rate=0.5, steps=2, client=0), Draws(rate=0.1, steps=10, client=1))
    """
    front: list[Draws] = []
    for client in np.lexsort((-steps_C, -rate_C)).tolist():
        if not front or steps_C[client] > front[-1].steps:
            front.append(Draws(rate=float(rate_C[client]), steps=int(steps_C[client]), client=client))
    return tuple(front) if len(front) <= EXACT else _joined(front)


def _joined(front: list[Draws]) -> tuple[Draws, ...]:
    """Replace runs of neighbours by one client with their largest rate and most steps, whose epsilon is no smaller.

    Rates fall and steps rise along the front. Epsilon is about proportional to the rate times the root of the steps:
    where the rate is below the largest by a factor s, steps may grow by nearly s before that client's epsilon comes
    close to the largest. This leaves few groups, and the largest epsilon grows by about 1 % at most, from NEAR.
    """
    joined: list[Draws] = []
    first = front[0]
    for draws in front:
        if joined and draws.steps <= first.steps * max(NEAR, FAR * front[0].rate / first.rate):
            joined[-1] = first._replace(steps=draws.steps)
        else:
            joined.append(draws)
            first = draws
    return tuple(joined)
