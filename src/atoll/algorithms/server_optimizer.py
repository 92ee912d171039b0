"""What FedAdagrad, FedAdam and FedYogi share (Reddi et al. 2021, arXiv:2003.00295, algorithm 2)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from atoll.core.algorithm import Algorithm, ServerTask
from atoll.core.errors import PlanError
from atoll.core.messages import Aggregate, State

Second = Callable[[Tensor, Tensor], Tensor]
"""(v, delta squared) -> v."""


def adaptive(second: Second, *, name: str, beta1: float, beta2: float, tau: float, server_lr: float) -> Algorithm:
    """Step m <- beta1 m + (1 - beta1) delta, v by `second`, w <- w + lr m / (sqrt(v) + tau); v starts at tau^2."""
    if not (0 <= beta1 < 1 and 0 <= beta2 < 1):
        raise PlanError(f"{name}: beta1 and beta2 must be in [0, 1), got {beta1} and {beta2}")
    if not tau > 0:
        raise PlanError(f"{name}: tau must be above 0, got {tau}; 0.001 is usual")

    def init_server(params_D: Tensor) -> State:
        return {"first": torch.zeros_like(params_D), "second": torch.full_like(params_D, tau**2)}

    def server_step(params_D: Tensor, aggregate: Aggregate, server: State, task: ServerTask) -> tuple[Tensor, State]:
        first_D = beta1 * server["first"] + (1 - beta1) * aggregate.delta_D
        second_D = second(server["second"], aggregate.delta_D.square())
        moved_D = params_D + task.lr * first_D / (second_D.sqrt() + tau)
        return moved_D, {"first": first_D, "second": second_D}

    return Algorithm(init_server=init_server, server_step=server_step, server_lr=server_lr)
