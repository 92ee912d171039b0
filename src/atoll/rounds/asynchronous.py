"""Asynchronous rounds: every answer makes a version."""

from __future__ import annotations

from atoll.core.coordinator import Policy
from atoll.core.errors import PlanError
from atoll.rounds.overlapping import keep_busy, staleness_rule


def asynchronous(
    concurrency: int = 10, mixing: float = 0.6, staleness: str = "polynomial", a: float = 0.5, b: float = 4.0
) -> Policy:
    """Mix each answer into the model as it comes: w <- (1 - m) w + m w_k (Xie et al. 2019, FedAsync).

    arXiv:1903.03934, algorithm 1: m is `mixing` times the staleness factor: constant, hinge or polynomial.
    """
    if not 0 < mixing <= 1:
        raise PlanError(f"policy.mixing must be in (0, 1], got {mixing}")
    factor = staleness_rule(staleness, a, b)
    return keep_busy(concurrency, 1, lambda late: mixing * factor(late), mixes=True)
