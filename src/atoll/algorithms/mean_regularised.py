"""Mean-regularised multi-task learning."""

from __future__ import annotations

from torch import Tensor

from atoll.core.algorithm import Algorithm, LocalTask
from atoll.core.messages import Broadcast, State, Update
from atoll.core.options import NotNegative

OWN = "own"


def mean_regularised(lam: NotNegative = 0.1) -> Algorithm:
    """Let every client train its own model, pulled to the mean of all (Evgeniou and Pontil 2004, KDD, eq. 5).

    Clients minimise F_k(w_k) + lam / 2 ||w_k - m||^2, each from its own w_k on; what is shared is the mean m of the
    last cohort's models (the federated form: Hanzely and Richtarik 2020, arXiv:2002.05516, eq. 2).
    """

    def init(params_D: Tensor) -> State:
        return {OWN: params_D.clone()}

    def start(sent: Broadcast, state: State) -> Tensor:
        return state[OWN]

    def local_grad(grad_D: Tensor, params_D: Tensor, task: LocalTask) -> Tensor:
        return grad_D + lam * (params_D - task.broadcast.params_D)

    def finish(delta_D: Tensor, task: LocalTask) -> tuple[Update, State]:
        return Update(task.end_D - task.broadcast.params_D, task.num_samples, {}), {OWN: task.end_D}

    def personal(params_D: Tensor, state: State) -> Tensor:
        return state[OWN].unsqueeze(0)

    return Algorithm(
        init_client=init, start=start, local_grad=local_grad if lam else None, finish=finish, personal=personal
    )
