"""q-FFL."""

from __future__ import annotations

from typing import Annotated

from torch import Tensor

from atoll.core.algorithm import Algorithm, Expected, LocalTask, ServerTask
from atoll.core.messages import Aggregate, State, Update
from atoll.core.options import at_least

MIN_LOSS = 1e-10
"""Lower bound on a client's loss: smaller losses are raised to it."""
MAX_LOSS = 1e4
"""Largest plausible loss: an update that only a larger one explains is rejected."""


def qffl(q: Annotated[float, at_least(0, "0 is fedavg")] = 1.0) -> Algorithm:
    """Favour clients with a high loss, more so for larger q (Li et al. 2020, arXiv:1905.10497, q-FedAvg).

    Algorithm 2, L = 1 / lr, d_k = delta_k / lr: each client sends F_k^q d_k and q F_k^(q-1) ||d_k||^2 + F_k^q / lr,
    where F_k is the broadcast model's loss; the model moves by the ratio of their sums. q = 0 is FedAvg.
    """

    def finish(delta_D: Tensor, task: LocalTask) -> tuple[Update, State]:
        loss = task.first_loss.clamp(min=MIN_LOSS)
        slope_D = delta_D / task.lr
        scale = q * loss.pow(q - 1) * slope_D.square().sum() + loss.pow(q) / task.lr
        return Update(loss.pow(q) * slope_D, task.num_samples, {"scale": scale.reshape(1)}), {}

    def server_step(params_D: Tensor, aggregate: Aggregate, server: State, task: ServerTask) -> tuple[Tensor, State]:
        return params_D + task.lr * aggregate.delta_D / aggregate.aux["scale"], server

    def plausible(updates: Update, expected: Expected) -> Tensor:
        """Accept updates whose step some loss F up to MAX_LOSS gives, however the uplink has scaled both numbers.

        F^q d / (q F^(q-1) d^2 + F^q / lr) is longest at d^2 = F / (q lr), where it is sqrt(F lr / q) / 2. Sums over
        accepted clients with positive scales never give a longer step.
        """
        scale_C = updates.aux["scale"][:, 0].double()
        if q == 0:
            return scale_C > 0
        step_C = (MAX_LOSS * expected.lr_C.double() / q).sqrt()
        norm_C: Tensor = updates.delta_D.double().norm(dim=1)
        return (scale_C > 0) & (norm_C <= step_C * scale_C)

    return Algorithm(finish=finish, server_step=server_step, plausible=plausible, needs_loss=True)
