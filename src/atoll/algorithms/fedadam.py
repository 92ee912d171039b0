"""FedAdam."""

from __future__ import annotations

from atoll.algorithms.server_optimizer import adaptive
from atoll.core.algorithm import Algorithm


def fedadam(beta1: float = 0.9, beta2: float = 0.99, tau: float = 1e-3) -> Algorithm:
    """Let the server step by Adam (Reddi et al. 2021, arXiv:2003.00295): v <- beta2 v + (1 - beta2) delta^2.

    The server's learning rate is 0.03 unless the plan says otherwise.
    """
    return adaptive(
        lambda v_D, square_D: beta2 * v_D + (1 - beta2) * square_D,
        name="fedadam",
        beta1=beta1,
        beta2=beta2,
        tau=tau,
        server_lr=0.03,
    )
