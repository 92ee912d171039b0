"""Asynchronous rounds: every update makes a version."""

from __future__ import annotations

from atoll.core.coordinator import Policy
from atoll.core.options import Count, NotNegative, ShareAboveZero
from atoll.rounds.overlapping import Staleness, overlapping_policy, staleness_factor


def asynchronous(
    concurrency: Count = 10,
    mixing: ShareAboveZero = 0.6,
    staleness: Staleness = "polynomial",
    a: NotNegative = 0.5,
    b: NotNegative = 4.0,
) -> Policy:
    """Mix each client's model into the global one when it arrives: w <- (1 - m) w + m w_k (Xie et al. 2019, FedAsync).

    arXiv:1903.03934, algorithm 1: m is `mixing` times the staleness factor, which is constant, hinge or polynomial.
    """
    factor = staleness_factor(staleness, a, b)
    return overlapping_policy(concurrency, 1, lambda late: mixing * factor(late), interpolates=True)
