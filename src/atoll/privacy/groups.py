"""Clients by how often a task draws each of their samples, so that each is accounted for by what it does itself.

Shapes: C clients.
"""

from __future__ import annotations

import numpy as np

from atoll.core.privacy import Draws

EXACT = 8
"""Up to so many groups are kept as they are; of more, some are joined."""
NEAR, FAR = 1.02, 0.9
"""By how much the steps of joined clients may differ: by 2 %, or by most of what their rate is below the largest."""


def most_exposed(rate_C: np.ndarray, steps_C: np.ndarray) -> tuple[Draws, ...]:
    """Return the draws that no other client exceeds in both rate and steps: the largest epsilon is one of theirs.

    Epsilon grows with the rate and with the steps, so that a client counts for nothing if another has at least as much
    of both.

    >>> most_exposed(np.array([0.5, 0.1, 0.1]), np.array([2, 10, 3]))
    (Draws(rate=0.5, steps=2, client=0), Draws(rate=0.1, steps=10, client=1))
    """
    front: list[Draws] = []
    for client in np.lexsort((-steps_C, -rate_C)).tolist():
        if not front or steps_C[client] > front[-1].steps:
            front.append(Draws(rate=float(rate_C[client]), steps=int(steps_C[client]), client=client))
    return tuple(front) if len(front) <= EXACT else _joined(front)


def _joined(front: list[Draws]) -> tuple[Draws, ...]:
    """Take neighbours for one client that has the largest rate and the most steps among them, and so spends no less.

    Rates fall and steps rise along the list. Epsilon goes about with the rate times the root of the steps: at a rate
    that is below the largest by a factor s it is far from the largest epsilon, and steps may grow by nearly as much
    before it is not. So there are few groups, and the largest epsilon grows by about 1 % at most, from NEAR.
    """
    joined: list[Draws] = []
    first = front[0]
    for each in front:
        if joined and each.steps <= first.steps * max(NEAR, FAR * front[0].rate / first.rate):
            joined[-1] = first._replace(steps=each.steps)
        else:
            joined.append(each)
            first = each
    return tuple(joined)
