"""Per-FedAvg."""

from __future__ import annotations

from typing import Annotated, Literal

from torch import Tensor

from atoll.core.algorithm import Adapt, Algorithm, LocalTask
from atoll.core.options import Positive, at_least


def per_fedavg(
    alpha: Annotated[float, at_least(0)] = 0.05,
    way: Literal["first_order", "hessian_free"] = "first_order",
    delta: Positive = 1e-3,
    steps: Annotated[int, at_least(0)] = 1,
) -> Algorithm:
    """Share a model from which one step leads to a client's own (Fallah et al. 2020, arXiv:2002.07948, algorithm 1).

    Local gradient: (I - alpha H) g with g = grad F_k(w - alpha grad F_k(w)), where g, the gradient within it and the
    Hessian H(w) are each of another part of the batch. `first_order` leaves H out (section 5, FO); `hessian_free`
    takes H g = (grad F_k(w + d g) - grad F_k(w - d g)) / 2d for d = `delta` (HF). A client uses the model after
    `steps` steps of size alpha on its own samples; with alpha = 0 it is that of FedAvg.
    """
    parts = 2 if way == "first_order" else 3

    def local_grad(grad_D: Tensor, params_D: Tensor, task: LocalTask) -> Tensor:
        inner_D = task.grad_at(params_D, 0, parts)
        outer_D = task.grad_at(params_D - alpha * inner_D, 1, parts)
        if way == "first_order":
            return outer_D
        ahead_D, behind_D = (task.grad_at(params_D + side * delta * outer_D, 2, parts) for side in (1, -1))
        return outer_D - alpha * (ahead_D - behind_D) / (2 * delta)

    if not alpha:
        return Algorithm()
    return Algorithm(local_grad=local_grad, adapt=Adapt(steps, alpha))
