"""FedSAM."""

from __future__ import annotations

from torch import Tensor

from atoll.core.algorithm import Algorithm, LocalTask
from atoll.core.errors import PlanError


def fedsam(rho: float = 0.05) -> Algorithm:
    """Let clients look for flat minima (Qu et al. 2022, arXiv:2206.02618, algorithm 1).

    Local gradient: grad F_k(w + rho * grad F_k(w) / ||grad F_k(w)||), both on the same batch.
    """
    if rho < 0:
        raise PlanError(f"fedsam needs rho >= 0: got {rho}; rho = 0 is fedavg")

    def local_grad(grad_D: Tensor, params_D: Tensor, task: LocalTask) -> Tensor:
        return task.grad_at(params_D + rho * grad_D / (grad_D.norm() + 1e-12))

    return Algorithm(local_grad=local_grad)
