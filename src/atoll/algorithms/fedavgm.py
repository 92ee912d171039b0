"""FedAvgM."""

from __future__ import annotations

import torch
from torch import Tensor

from atoll.core.algorithm import Algorithm, ServerTask
from atoll.core.messages import Aggregate, State
from atoll.core.options import ShareBelowOne


def fedavgm(momentum: ShareBelowOne = 0.9) -> Algorithm:
    """Give the server momentum (Hsu et al. 2019, arXiv:1909.06335, sec. 4.3): v <- beta v + delta, w <- w + lr v."""

    def init_server(params_D: Tensor) -> State:
        return {"velocity": torch.zeros_like(params_D)}

    def server_step(params_D: Tensor, aggregate: Aggregate, server: State, task: ServerTask) -> tuple[Tensor, State]:
        velocity_D = momentum * server["velocity"] + aggregate.delta_D
        return params_D + task.lr * velocity_D, {"velocity": velocity_D}

    return Algorithm(init_server=init_server, server_step=server_step)
