"""FedDyn."""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor

from atoll.core.algorithm import Algorithm, Drift, LocalTask, ServerTask, at_most
from atoll.core.messages import Aggregate, State, Update
from atoll.core.options import above


def feddyn(alpha: Annotated[float, above(0, "for alpha = 0 use fedavg")] = 0.1) -> Algorithm:
    """Regularise each client so that its optimum is the global one (Acar et al. 2021, arXiv:2111.04263, algorithm 1).

    Local gradient: grad L_k(w) - g_k + alpha (w - w_t), then g_k' = g_k - alpha (w_k - w_t). The server keeps
    h' = h - alpha / m * sum_k (w_k - w_t) over the participants and moves to mean(w_k) - h' / alpha.
    Clients count equally, as in the paper.
    """

    def init(params_D: Tensor) -> State:
        return {"dual": torch.zeros_like(params_D)}

    def local_grad(grad_D: Tensor, params_D: Tensor, task: LocalTask) -> Tensor:
        return grad_D + alpha * (params_D - task.broadcast.params_D) - task.state["dual"]

    def finish(delta_D: Tensor, task: LocalTask) -> tuple[Update, State]:
        return Update(delta_D, torch.ones_like(task.num_samples), {}), {"dual": task.state["dual"] - alpha * delta_D}

    def server_step(params_D: Tensor, aggregate: Aggregate, server: State, task: ServerTask) -> tuple[Tensor, State]:
        participation = aggregate.num_clients / task.num_clients
        dual_D = server["dual"] - alpha * participation * aggregate.delta_D
        return params_D + task.lr * (aggregate.delta_D - dual_D / alpha), {"dual": dual_D}

    return Algorithm(
        init_server=init,
        init_client=init,
        local_grad=local_grad,
        drift=lambda task: Drift(pull=alpha, shift_D=-task.state["dual"]),
        finish=finish,
        server_step=server_step,
        max_weight=at_most(1.0),
    )
