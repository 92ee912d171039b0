"""LG-FedAvg."""

from __future__ import annotations

from atoll.core.algorithm import Algorithm


def lg_fedavg() -> Algorithm:
    """Keep the representation at each client, share the last layer (Liang et al. 2020, arXiv:2001.01523, algorithm 1).

    Both are trained together, as one model. A plan's `keep` or `share` says where else to cut.
    """
    return Algorithm(keep=("body",))
