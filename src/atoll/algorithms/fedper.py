"""FedPer."""

from __future__ import annotations

from atoll.core.algorithm import Algorithm


def fedper() -> Algorithm:
    """Share the layers below, keep the last at each client (Arivazhagan et al. 2019, arXiv:1912.00818, algorithm 1).

    Both are trained together, as one model. A plan's `keep` or `share` says where else to cut.
    """
    return Algorithm(keep=("head",))
