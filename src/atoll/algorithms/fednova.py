"""FedNova."""

from __future__ import annotations

from torch import Tensor

from atoll.core.algorithm import Algorithm, Expected, LocalTask, ServerTask
from atoll.core.messages import Aggregate, State, Update


def fednova() -> Algorithm:
    """Average updates per local step, so that clients with more steps do not dominate (Wang et al. 2020).

    arXiv:2007.07481, eq. 8: x + tau_eff * sum_k p_k delta_k / tau_k, with tau_eff = sum_k p_k tau_k; for plain steps
    ||a_k||_1 is the number of steps tau_k.
    """

    def finish(delta_D: Tensor, task: LocalTask) -> tuple[Update, State]:
        return Update(delta_D / task.num_steps, task.num_samples, {"steps": task.num_steps.reshape(1)}), {}

    def server_step(params_D: Tensor, aggregate: Aggregate, server: State, task: ServerTask) -> tuple[Tensor, State]:
        return params_D + task.lr * aggregate.aux["steps"] * aggregate.delta_D, server

    def plausible(updates: Update, expected: Expected) -> Tensor:
        return updates.aux["steps"][:, 0].abs() <= 2 * expected.num_steps_C

    return Algorithm(finish=finish, server_step=server_step, plausible=plausible, local={"optimizer": "sgd"})
