"""Stragglers as in the FedProx paper."""

from __future__ import annotations

import numpy as np

from atoll.core.devices import Devices, Load, Trip
from atoll.core.options import Share


def stragglers(fraction: Share = 0.5, drop: bool = False) -> Devices:
    """Let `fraction` of each cohort finish only a part of its work, uniform in (0, 1] (Li et al. 2020).

    arXiv:1812.06127, section 5.2. Stragglers send their partial update, or with `drop` are lost, as FedAvg's server
    would drop them. The number of stragglers is rounded. If that gives none or all of the cohort, as for a single
    client that replaces another, the fractional client is slow at random, so that `fraction` holds on average.
    """

    def trips(loads: list[Load], rng: np.random.Generator) -> list[Trip]:
        num_slow = round(fraction * len(loads))
        if num_slow in (0, len(loads)):
            whole, rest = divmod(fraction * len(loads), 1)
            num_slow = int(whole) + (rest > 0 and bool(rng.random() < rest))
        slow = set(rng.choice(len(loads), size=num_slow, replace=False).tolist())
        work = 1 - rng.random(len(loads))
        return [Trip(1.0, fails=drop, work=float(work[i])) if i in slow else Trip(1.0) for i in range(len(loads))]

    return Devices(trips)
