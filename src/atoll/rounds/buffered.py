"""Buffered asynchronous rounds."""

from __future__ import annotations

from atoll.core.coordinator import Policy
from atoll.rounds.overlapping import keep_busy, staleness_rule


def buffered(
    size: int = 10, concurrency: int = 100, staleness: str = "polynomial", a: float = 0.5, b: float = 4.0
) -> Policy:
    """Keep `concurrency` clients at work and commit whenever `size` have answered (Nguyen et al. 2022, FedBuff).

    arXiv:2106.06639, algorithm 1: an update that is s versions late is multiplied by 1 / sqrt(1 + s), which is the
    polynomial rule with a = 0.5, and the mean is taken over the buffer.
    """
    return keep_busy(concurrency, size, staleness_rule(staleness, a, b), mixes=False)
