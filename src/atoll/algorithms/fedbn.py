"""FedBN."""

from __future__ import annotations

from atoll.core.algorithm import Algorithm


def fedbn() -> Algorithm:
    """Keep the layers that normalise at each client, share the others (Li et al. 2021, arXiv:2102.07623, algorithm 1).

    For clients whose features differ: scale, shift and statistics of the norms follow each client's own.
    """
    return Algorithm(keep=("norms",))
