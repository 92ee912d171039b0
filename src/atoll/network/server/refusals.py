"""How long clients that have refused work are not asked."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import NamedTuple

from atoll.network.server.tables import RefusalRow

FIRST_REFUSAL, LONGEST_REFUSAL = 10.0, 3600.0
"""Seconds for which a client is not asked after its first refusal; each one doubles them, up to an hour."""


class RefusalState(NamedTuple):
    """How long a client that has refused work is not asked."""

    whole_run: bool
    """Whether it takes no part in the run at all."""
    until: float
    """The monotonic time until which it is not asked."""


def refusal_states(rows: Iterable[RefusalRow]) -> dict[int, RefusalState]:
    """Return how long clients are not asked from now on, by their numbers."""
    now, states = time.monotonic(), dict[int, RefusalState]()
    for row in rows:
        pause = min(LONGEST_REFUSAL, FIRST_REFUSAL * 2.0 ** min(row.times - 1, 30))
        states[row.client] = RefusalState(row.whole_run, now + pause)
    return states
