"""FedExP."""

from __future__ import annotations

from torch import Tensor

from atoll.core.algorithm import Algorithm, Expected, LocalTask, ServerTask
from atoll.core.messages import Aggregate, State, Update
from atoll.core.options import NotNegative

MAX_SQUARE_RATIO = 1e6
"""Largest plausible ratio of the squared norm that a client reports to that of its update after a lossy uplink."""


def fedexp(epsilon: NotNegative = 1e-3) -> Algorithm:
    """Take longer server steps where clients disagree (Jhunjhunwala et al. 2023, arXiv:2301.09604, eq. 6).

    The step size is max(1, mean ||delta_k||^2 / (2 (||mean delta||^2 + epsilon))) times the server's learning rate.
    """

    def finish(delta_D: Tensor, task: LocalTask) -> tuple[Update, State]:
        return Update(delta_D, task.num_samples, {"square": delta_D.square().sum().reshape(1)}), {}

    def server_step(params_D: Tensor, aggregate: Aggregate, server: State, task: ServerTask) -> tuple[Tensor, State]:
        step = aggregate.aux["square"] / (2 * (aggregate.delta_D.square().sum() + epsilon))
        return params_D + task.lr * step.clamp(min=1.0) * aggregate.delta_D, server

    def plausible(updates: Update, expected: Expected) -> Tensor:
        square_C = updates.aux["square"][:, 0]
        return (square_C >= 0) & (square_C <= MAX_SQUARE_RATIO * updates.delta_D.square().sum(1) + epsilon)

    return Algorithm(finish=finish, server_step=server_step, plausible=plausible)
