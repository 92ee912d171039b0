"""FedYogi."""

from __future__ import annotations

from atoll.algorithms.server_optimizer import Tau, adaptive
from atoll.core.algorithm import Algorithm
from atoll.core.options import ShareBelowOne

SMOOTH = {"tau": 1.0}


def fedyogi(beta1: ShareBelowOne = 0.9, beta2: ShareBelowOne = 0.99, tau: Tau = 1e-3) -> Algorithm:
    """Let the server step by Yogi (Reddi et al. 2021, arXiv:2003.00295).

    v <- v - (1 - beta2) delta^2 sign(v - delta^2). The server's learning rate is 0.03 unless the plan says otherwise.
    """
    return adaptive(
        lambda v_D, square_D: v_D - (1 - beta2) * square_D * (v_D - square_D).sign(),
        beta1=beta1,
        tau=tau,
        server_lr=0.03,
    )
