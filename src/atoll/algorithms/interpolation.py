"""Interpolation of an own and the shared model."""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor

from atoll.core.algorithm import Algorithm, LocalTask, spread
from atoll.core.messages import State, Update
from atoll.core.options import Range

OWN = "own"


def interpolation(grid: Annotated[int, Range(1, 1001)] = 11) -> Algorithm:
    """Mix an own and the shared model by the weight that does best at the client (Mansour et al. 2020, section 5).

    arXiv:2002.10619 calls it MAPPER. The shared model is that of FedAvg; on its batches the client also trains a model
    v alone, by plain steps. It uses a v + (1 - a) w for the a of `grid` evenly spaced ones in [0, 1] that has the
    least loss on the client's validation samples (`evaluation.validation`).
    """

    def init(params_D: Tensor) -> State:
        return {OWN: params_D.clone()}

    def local_memory(params_D: Tensor, task: LocalTask) -> State:
        own_D = task.state[OWN]
        return {OWN: own_D.addcmul(task.grad_at(own_D), spread(-task.lr, own_D))}

    def finish(delta_D: Tensor, task: LocalTask) -> tuple[Update, State]:
        return Update(delta_D, task.num_samples, {}), {OWN: task.state[OWN]}

    def personal(params_D: Tensor, state: State) -> Tensor:
        weights = torch.linspace(0, 1, grid, dtype=params_D.dtype, device=params_D.device)
        return torch.stack([params_D.lerp(state[OWN], weight) for weight in weights])

    return Algorithm(
        init_client=init, local_memory=local_memory, finish=finish, personal=personal, needs_validation=True
    )
