"""FedSAM."""

from __future__ import annotations

from typing import Annotated

from torch import Tensor

from atoll.core.algorithm import Algorithm, LocalTask
from atoll.core.options import at_least

EXAMPLES = [{}, {"rho": 0.5}]


def fedsam(rho: Annotated[float, at_least(0, "0 is fedavg")] = 0.05) -> Algorithm:
    """Let clients look for flat minima (Qu et al. 2022, arXiv:2206.02618, algorithm 1).

    Local gradient: grad F_k(w + rho * grad F_k(w) / ||grad F_k(w)||), both on the same batch.
    """

    def local_grad(grad_D: Tensor, params_D: Tensor, task: LocalTask) -> Tensor:
        return task.grad_at(params_D + rho * grad_D / (grad_D.norm() + 1e-12))

    return Algorithm(local_grad=local_grad)
