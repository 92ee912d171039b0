"""Training alone."""

from __future__ import annotations

import torch
from torch import Tensor

from atoll.core.algorithm import Algorithm, LocalTask, ServerTask
from atoll.core.messages import Aggregate, Broadcast, State, Update

OWN = "own"


def local() -> Algorithm:
    """Let every client train alone, from the first model on: what a federation must be better than.

    Each client takes the same steps on the same batches as with another algorithm; what it sends is zero.
    """

    def init(params_D: Tensor) -> State:
        return {OWN: params_D.clone()}

    def start(sent: Broadcast, state: State) -> Tensor:
        return state[OWN]

    def finish(delta_D: Tensor, task: LocalTask) -> tuple[Update, State]:
        return Update(torch.zeros_like(delta_D), task.num_samples, {}), {OWN: task.end_D}

    def server_step(params_D: Tensor, aggregate: Aggregate, server: State, task: ServerTask) -> tuple[Tensor, State]:
        return params_D, server  # so that clients that join late start from the first model, whatever others send

    def personal(params_D: Tensor, state: State) -> Tensor:
        return state[OWN].unsqueeze(0)

    return Algorithm(init_client=init, start=start, finish=finish, server_step=server_step, personal=personal)
