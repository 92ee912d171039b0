"""Asynchronous rounds: every answer makes a version."""

from __future__ import annotations

from atoll.core.coordinator import Policy
from atoll.core.options import Count, NotNegative, ShareAboveZero
from atoll.rounds.overlapping import Staleness, keep_busy, staleness_rule


def asynchronous(
    concurrency: Count = 10,
    mixing: ShareAboveZero = 0.6,
    staleness: Staleness = "polynomial",
    a: NotNegative = 0.5,
    b: NotNegative = 4.0,
) -> Policy:
    """Mix each answer into the model as it comes: w <- (1 - m) w + m w_k (Xie et al. 2019, FedAsync).

    arXiv:1903.03934, algorithm 1: m is `mixing` times the staleness factor: constant, hinge or polynomial.
    """
    factor = staleness_rule(staleness, a, b)
    return keep_busy(concurrency, 1, lambda late: mixing * factor(late), interpolates=True)
