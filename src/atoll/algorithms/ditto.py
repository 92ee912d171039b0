"""Ditto."""

from __future__ import annotations

from torch import Tensor

from atoll.core.algorithm import Algorithm, LocalTask, spread
from atoll.core.messages import State, Update
from atoll.core.options import NotNegative

OWN = "own"
"""Under this name a client remembers its own model."""


def ditto(lam: NotNegative = 0.1) -> Algorithm:
    """Train an own model beside the shared one and pull it towards that (Li et al. 2021, arXiv:2012.04221, eq. Ditto).

    The shared model w is that of FedAvg. On each batch of it the client also moves its own model v, by plain steps
    v <- v - lr (grad F_k(v) + lam (v - w_t)). With lam = 0 it is trained alone; a large lam gives the shared model.
    """

    def init(params_D: Tensor) -> State:
        return {OWN: params_D.clone()}

    def local_memory(params_D: Tensor, task: LocalTask) -> State:
        own_D = task.state[OWN]
        step_D = task.grad_at(own_D)
        step_D = step_D + lam * (own_D - task.broadcast.params_D) if lam else step_D
        return {OWN: own_D.addcmul(step_D, spread(-task.lr, own_D))}

    def finish(delta_D: Tensor, task: LocalTask) -> tuple[Update, State]:
        return Update(delta_D, task.num_samples, {}), {OWN: task.state[OWN]}

    def personal(params_D: Tensor, state: State) -> Tensor:
        return state[OWN].unsqueeze(0)

    return Algorithm(init_client=init, local_memory=local_memory, finish=finish, personal=personal)
