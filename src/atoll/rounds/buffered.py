"""Buffered asynchronous rounds."""

from __future__ import annotations

from atoll.core.coordinator import Policy
from atoll.core.options import Count, NotNegative
from atoll.rounds.overlapping import Staleness, overlapping_policy, staleness_factor


def buffered(
    size: Count = 10,
    concurrency: Count = 100,
    staleness: Staleness = "polynomial",
    a: NotNegative = 0.5,
    b: NotNegative = 4.0,
) -> Policy:
    """Keep `concurrency` clients training and commit whenever `size` updates arrived (Nguyen et al. 2022, FedBuff).

    arXiv:2106.06639, algorithm 1: an update that is s versions late is multiplied by 1 / sqrt(1 + s), which is the
    polynomial rule with a = 0.5, and the mean is taken over the buffer.
    """
    return overlapping_policy(concurrency, size, staleness_factor(staleness, a, b), interpolates=False)
