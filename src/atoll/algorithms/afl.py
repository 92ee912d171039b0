"""Agnostic federated learning."""

from __future__ import annotations

import math
from typing import Annotated

import torch
from torch import Tensor

from atoll.core.algorithm import Algorithm, LocalTask, ServerTask, at_most
from atoll.core.messages import Aggregate, State, Update
from atoll.core.options import above

MAX_LOG_WEIGHT = 20.0
"""Bound on |log weight|: no client's weight underflows to zero, and none overflows."""


def afl(step: Annotated[float, above(0, "for fixed weights use fedavg")] = 0.1) -> Algorithm:
    """Minimise the loss of the worst mixture of clients (Mohri et al. 2019, arXiv:1902.00146, eq. 4).

    The mixture is updated by multiplicative weights, lambda_k <- lambda_k exp(step (F_k - mean F)), where the paper
    projects gradient steps onto the simplex. Each client stores its own lambda_k and updates it when it takes part.
    """

    def init_server(params_D: Tensor) -> State:
        return {"loss": params_D.new_full((1,), torch.nan)}

    def init_client(params_D: Tensor) -> State:
        return {"log_weight": params_D.new_zeros(1)}

    def broadcast(params_D: Tensor, server: State) -> State:
        return {"loss": server["loss"]}

    def finish(delta_D: Tensor, task: LocalTask) -> tuple[Update, State]:
        loss = task.first_loss.reshape(1)
        mean_loss = torch.where(task.broadcast.aux["loss"].isnan(), loss, task.broadcast.aux["loss"])
        log_weight = (task.state["log_weight"] + step * (loss - mean_loss)).clamp(-MAX_LOG_WEIGHT, MAX_LOG_WEIGHT)
        return Update(delta_D, log_weight.exp()[0], {"loss": loss}), {"log_weight": log_weight}

    def server_step(params_D: Tensor, aggregate: Aggregate, server: State, task: ServerTask) -> tuple[Tensor, State]:
        return params_D + task.lr * aggregate.delta_D, {"loss": aggregate.aux["loss"]}

    return Algorithm(
        init_server=init_server,
        init_client=init_client,
        broadcast=broadcast,
        finish=finish,
        server_step=server_step,
        max_weight=at_most(math.exp(MAX_LOG_WEIGHT)),
        needs_loss=True,
    )
