"""Training alone."""

from __future__ import annotations

import torch
from torch import Tensor

from atoll.core.algorithm import Algorithm, LocalTask
from atoll.core.messages import Broadcast, State, Update

OWN = "own"


def local() -> Algorithm:
    """Let every client train alone, from the first model on: what a federation must be better than.

    Each client takes the same steps on the same batches as with another algorithm; what it sends is zero.
    """

    def init(params_D: Tensor) -> State:
        return {OWN: params_D.clone()}  # nobody moves the shared model, so that this is the first one

    def start(sent: Broadcast, state: State) -> Tensor:
        return state[OWN]

    def finish(delta_D: Tensor, task: LocalTask) -> tuple[Update, State]:
        return Update(torch.zeros_like(delta_D), task.num_samples, {}), {OWN: task.end_D}

    def personal(params_D: Tensor, state: State) -> Tensor:
        return state[OWN].unsqueeze(0)

    return Algorithm(init_client=init, start=start, finish=finish, personal=personal)
