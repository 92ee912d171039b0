"""FedProx."""

from __future__ import annotations

from typing import Annotated

from torch import Tensor

from atoll.core.algorithm import Algorithm, Drift, LocalTask
from atoll.core.options import at_least


def fedprox(mu: Annotated[float, at_least(0, "0 is fedavg")] = 0.01) -> Algorithm:
    """Pull each client towards the broadcast model (Li et al. 2020, arXiv:1812.06127, eq. 2).

    Local gradient: grad F_k(w) + mu * (w - w_t).
    """

    def local_grad(grad_D: Tensor, params_D: Tensor, task: LocalTask) -> Tensor:
        return grad_D + mu * (params_D - task.broadcast.params_D)

    return Algorithm(local_grad=local_grad, drift=lambda task: Drift(pull=mu))
