"""q-FFL."""

from __future__ import annotations

from torch import Tensor

from atoll.core.algorithm import Algorithm, Expected, LocalTask, ServerTask
from atoll.core.errors import PlanError
from atoll.core.messages import Aggregate, State, Update

LEAST_LOSS = 1e-10
"""A smaller loss counts as this."""


def qffl(q: float = 1.0) -> Algorithm:
    """Fit clients with a high loss better, the more so the larger q (Li et al. 2020, arXiv:1905.10497, q-FedAvg).

    Algorithm 2, L = 1 / lr, d_k = delta_k / lr: each client sends F_k^q d_k and q F_k^(q-1) ||d_k||^2 + F_k^q / lr,
    where F_k is the broadcast model's loss; the model moves by the ratio of their sums. q = 0 is FedAvg.
    """
    if q < 0:
        raise PlanError(f"qffl needs q >= 0: got {q}; q = 0 is fedavg")

    def finish(delta_D: Tensor, task: LocalTask) -> tuple[Update, State]:
        loss = task.first_loss.clamp(min=LEAST_LOSS)
        slope_D = delta_D / task.lr
        scale = q * loss.pow(q - 1) * slope_D.square().sum() + loss.pow(q) / task.lr
        return Update(loss.pow(q) * slope_D, task.num_samples, {"scale": scale.reshape(1)}), {}

    def server_step(params_D: Tensor, aggregate: Aggregate, server: State, task: ServerTask) -> tuple[Tensor, State]:
        return params_D + task.lr * aggregate.delta_D / aggregate.aux["scale"], server

    def plausible(updates: Update, expected: Expected) -> Tensor:
        """Ask for half of the least scale that any loss F gives an update of this length: no step is longer than it.

        With s = |F^q d|, q s^2 / F^(q+1) + F^q / lr is least where F^(2q+1) = (q + 1) lr s^2.
        """
        square_C, lr_C = updates.delta_D.double().square().sum(1), expected.lr_C.double()
        loss_C = ((q + 1) * lr_C * square_C).pow(1 / (2 * q + 1)).clamp(min=LEAST_LOSS)
        least_C = q * square_C / loss_C.pow(q + 1) + loss_C.pow(q) / lr_C
        return updates.aux["scale"][:, 0] >= least_C / 2

    return Algorithm(finish=finish, server_step=server_step, plausible=plausible, needs_loss=True)
