"""pFedMe."""

from __future__ import annotations

from torch import Tensor

from atoll.core.algorithm import Algorithm, LocalTask
from atoll.core.messages import State, Update
from atoll.core.options import Count, Positive

OWN = "own"


def pfedme(lam: Positive = 1.0, steps: Count = 5, lr: Positive | None = None) -> Algorithm:
    """Share the centre of clients' Moreau envelopes (Dinh et al. 2020, arXiv:2006.08848, algorithm 1).

    On each batch the client solves for its own model t = argmin F_k(t) + lam / 2 ||t - w||^2 by `steps` steps of size
    `lr` (that of the plan unless given), and moves w <- w - local.lr * lam (w - t). The paper's beta is `server.lr`.
    """

    def init(params_D: Tensor) -> State:
        return {OWN: params_D.clone()}

    def local_step(grad_D: Tensor, params_D: Tensor, task: LocalTask) -> tuple[Tensor, State]:
        own_D, size = task.state[OWN], task.lr if lr is None else lr
        for _ in range(steps):
            own_D = own_D - size * (task.grad_at(own_D) + lam * (own_D - params_D))
        return lam * (params_D - own_D), {OWN: own_D}

    def finish(delta_D: Tensor, task: LocalTask) -> tuple[Update, State]:
        return Update(delta_D, task.num_samples, {}), {OWN: task.state[OWN]}

    def personal(params_D: Tensor, state: State) -> Tensor:
        return state[OWN].unsqueeze(0)

    return Algorithm(
        init_client=init, local_step=local_step, finish=finish, personal=personal, local={"optimizer": "sgd"}
    )
