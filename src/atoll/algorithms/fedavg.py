"""Federated averaging."""

from __future__ import annotations

from atoll.core.algorithm import Algorithm


def fedavg() -> Algorithm:
    """Train locally, average the results by n_k (McMahan et al. 2017, arXiv:1602.05629, algorithm 1)."""
    return Algorithm()
