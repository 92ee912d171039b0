"""Federated SGD."""

from __future__ import annotations

from atoll.core.algorithm import Algorithm


def fedsgd() -> Algorithm:
    """Send one full-batch gradient a round (McMahan et al. 2017, arXiv:1602.05629, section 2).

    w <- w - lr * sum_k (n_k / n) grad F_k(w).
    """
    return Algorithm(local={"epochs": 1, "batch_size": "all", "optimizer": "sgd"})
