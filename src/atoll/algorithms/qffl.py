"""q-FFL."""

from __future__ import annotations

from typing import Annotated

from torch import Tensor

from atoll.core.algorithm import Algorithm, LocalTask, ServerTask
from atoll.core.messages import Aggregate, State, Update
from atoll.core.options import at_least


def qffl(q: Annotated[float, at_least(0, "0 is fedavg")] = 1.0) -> Algorithm:
    """Fit clients with a high loss better, the more so the larger q (Li et al. 2020, arXiv:1905.10497, q-FedAvg).

    Algorithm 2, L = 1 / lr, d_k = delta_k / lr: each client sends F_k^q d_k and q F_k^(q-1) ||d_k||^2 + F_k^q / lr,
    where F_k is the broadcast model's loss; the model moves by the ratio of their sums. q = 0 is FedAvg.
    """

    def finish(delta_D: Tensor, task: LocalTask) -> tuple[Update, State]:
        loss = task.first_loss.clamp(min=1e-10)
        slope_D = delta_D / task.lr
        scale = q * loss.pow(q - 1) * slope_D.square().sum() + loss.pow(q) / task.lr
        return Update(loss.pow(q) * slope_D, task.num_samples, {"scale": scale.reshape(1)}), {}

    def server_step(params_D: Tensor, aggregate: Aggregate, server: State, task: ServerTask) -> tuple[Tensor, State]:
        return params_D + task.lr * aggregate.delta_D / aggregate.aux["scale"], server

    return Algorithm(finish=finish, server_step=server_step, needs_loss=True)
