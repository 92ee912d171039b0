"""The adaptive server step of FedAdagrad, FedAdam and FedYogi (Reddi et al. 2021, arXiv:2003.00295, algorithm 2)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import torch
from torch import Tensor

from atoll.core.algorithm import Algorithm, ServerTask
from atoll.core.messages import Aggregate, State
from atoll.core.options import above

SecondMoment = Callable[[Tensor, Tensor], Tensor]
"""(v, delta squared) -> new v."""
Tau = Annotated[float, above(0, "0.001 is usual")]
"""Adaptivity: bounds the step where v is small."""


def adaptive(second_moment: SecondMoment, *, beta1: float, tau: float, server_lr: float) -> Algorithm:
    """Step w <- w + lr m / (sqrt(v) + tau), with m <- beta1 m + (1 - beta1) delta and v by `second_moment`.

    m starts at 0 and v at tau^2.
    """

    def init_server(params_D: Tensor) -> State:
        return {"first": torch.zeros_like(params_D), "second": torch.full_like(params_D, tau**2)}

    def server_step(params_D: Tensor, aggregate: Aggregate, server: State, task: ServerTask) -> tuple[Tensor, State]:
        first_D = beta1 * server["first"] + (1 - beta1) * aggregate.delta_D
        second_D = second_moment(server["second"], aggregate.delta_D.square())
        new_params_D = params_D + task.lr * first_D / (second_D.sqrt() + tau)
        return new_params_D, {"first": first_D, "second": second_D}

    return Algorithm(init_server=init_server, server_step=server_step, server_lr=server_lr)
