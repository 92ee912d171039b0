"""SCAFFOLD."""

from __future__ import annotations

import torch
from torch import Tensor

from atoll.core.algorithm import Algorithm, Drift, Expected, LocalTask, ServerTask, at_most
from atoll.core.messages import Aggregate, State, Update

MAX_CHANGE = 1e3
"""Bound c on a plausible change of a control variate: c (1 + mean gradient norm that the update implies)."""


def scaffold() -> Algorithm:
    """Correct client drift with control variates (Karimireddy et al. 2020, arXiv:1910.06378, algorithm 1, option II).

    Local gradient: grad F_i(y) - c_i + c; then c_i' = c_i - c + (x - y_i) / (K lr). The server adds the mean change of
    the c_i times |S| / N to c. Clients count equally, as in the paper; the c_i are correct only for plain SGD steps.
    """

    def init(params_D: Tensor) -> State:
        return {"control": torch.zeros_like(params_D)}

    def broadcast(params_D: Tensor, server: State) -> State:
        return {"control": server["control"]}

    def local_grad(grad_D: Tensor, params_D: Tensor, task: LocalTask) -> Tensor:
        return grad_D + (task.broadcast.aux["control"] - task.state["control"])

    def drift(task: LocalTask) -> Drift:
        return Drift(shift_D=task.broadcast.aux["control"] - task.state["control"])

    def finish(delta_D: Tensor, task: LocalTask) -> tuple[Update, State]:
        change_D = -task.broadcast.aux["control"] - delta_D / (task.num_steps * task.lr)
        update = Update(delta_D, torch.ones_like(task.num_samples), {"control": change_D})
        return update, {"control": task.state["control"] + change_D}

    def server_step(params_D: Tensor, aggregate: Aggregate, server: State, task: ServerTask) -> tuple[Tensor, State]:
        participation = aggregate.num_clients / task.num_clients
        control_D = server["control"] + participation * aggregate.aux["control"]
        return params_D + task.lr * aggregate.delta_D, {"control": control_D}

    def plausible(updates: Update, expected: Expected) -> Tensor:
        steps_C = expected.num_steps_C * expected.lr_C
        control_C: Tensor = updates.aux["control"].norm(dim=1)
        delta_C: Tensor = updates.delta_D.norm(dim=1)
        return control_C <= MAX_CHANGE * (1 + delta_C / steps_C)

    return Algorithm(
        init_server=init,
        init_client=init,
        broadcast=broadcast,
        local_grad=local_grad,
        drift=drift,
        finish=finish,
        server_step=server_step,
        plausible=plausible,
        max_weight=at_most(1.0),
        local={"optimizer": "sgd"},
    )
