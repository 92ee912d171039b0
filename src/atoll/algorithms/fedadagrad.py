"""FedAdagrad."""

from __future__ import annotations

from atoll.algorithms.server_optimizer import Tau, adaptive
from atoll.core.algorithm import Algorithm
from atoll.core.options import ShareBelowOne

SMOOTH = {"tau": 1.0}


def fedadagrad(beta1: ShareBelowOne = 0.0, tau: Tau = 1e-3) -> Algorithm:
    """Let the server step by Adagrad (Reddi et al. 2021, arXiv:2003.00295): v <- v + delta^2.

    The server's learning rate is 0.1 unless the plan says otherwise.
    """
    return adaptive(lambda v_D, square_D: v_D + square_D, beta1=beta1, tau=tau, server_lr=0.1)
