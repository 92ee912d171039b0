"""pFedMe."""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor

from atoll.core.algorithm import Algorithm, LocalTask
from atoll.core.messages import State, Update
from atoll.core.options import NotNegative, Positive, Range

OWN = "own"


def pfedme(lam: NotNegative = 1.0, steps: Annotated[int, Range(1, 1000)] = 5, lr: Positive | None = None) -> Algorithm:
    """Share the centre of clients' Moreau envelopes (Dinh et al. 2020, arXiv:2006.08848, algorithm 1).

    On each batch the client solves for its own model t = argmin F_k(t) + lam / 2 ||t - w||^2 by `steps` steps of size
    `lr` (that of the plan unless given), and moves w <- w - local.lr * lam (w - t). The paper's beta is `server.lr`.
    With lam = 0 nothing is shared: every client trains alone.
    """

    def init(params_D: Tensor) -> State:
        return {OWN: params_D.clone()}

    def local_memory(params_D: Tensor, task: LocalTask) -> State:
        own_D, size = (
            task.state[OWN],
            task.lr if lr is None else torch.tensor(lr, dtype=task.lr.dtype, device=task.lr.device),
        )
        for _ in range(steps):
            slope_D = task.grad_at(own_D)
            slope_D = slope_D + lam * (own_D - params_D) if lam else slope_D
            own_D = own_D.addcmul(slope_D, -size)
        return {OWN: own_D}

    def local_grad(grad_D: Tensor, params_D: Tensor, task: LocalTask) -> Tensor:
        return lam * (params_D - task.state[OWN])

    def finish(delta_D: Tensor, task: LocalTask) -> tuple[Update, State]:
        return Update(delta_D, task.num_samples, {}), {OWN: task.state[OWN]}

    def personal(params_D: Tensor, state: State) -> Tensor:
        return state[OWN].unsqueeze(0)

    return Algorithm(
        init_client=init,
        local_memory=local_memory,
        local_grad=local_grad,
        finish=finish,
        personal=personal,
        local={"optimizer": "sgd"},
    )
