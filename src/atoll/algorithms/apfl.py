"""APFL."""

from __future__ import annotations

from torch import Tensor

from atoll.core.algorithm import Algorithm, LocalTask, spread
from atoll.core.messages import State, Update
from atoll.core.options import Share

OWN, WEIGHT = "own", "weight"


def apfl(weight: Share = 0.5, adaptive: bool = True) -> Algorithm:
    """Mix an own and the shared model by a weight that is learnt (Deng et al. 2020, arXiv:2003.13461, algorithm 1).

    A client uses m = a v + (1 - a) w. On each batch w moves as in FedAvg, and v <- v - lr a grad F_k(m). In the first
    step of a task a <- a - lr <v - w, grad F_k(m)>, within [0, 1] (eq. 10), if it is `adaptive`.
    """

    def init(params_D: Tensor) -> State:
        return {OWN: params_D.clone(), WEIGHT: params_D.new_full((), weight)}

    def local_memory(params_D: Tensor, task: LocalTask) -> State:
        own_D, share = task.state[OWN], task.state[WEIGHT]
        slope_D = task.grad_at(share * own_D + (1 - share) * params_D)
        moved_D = own_D.addcmul(share * slope_D, spread(-task.lr, own_D))
        if adaptive:
            learnt = (share - task.lr * ((own_D - params_D) * slope_D).sum()).clamp(0, 1)
            share = learnt.where(task.step == 1, share)
        return {OWN: moved_D, WEIGHT: share}

    def finish(delta_D: Tensor, task: LocalTask) -> tuple[Update, State]:
        return Update(delta_D, task.num_samples, {}), {name: task.state[name] for name in (OWN, WEIGHT)}

    def personal(params_D: Tensor, state: State) -> Tensor:
        mixed_D = state[WEIGHT] * state[OWN] + (1 - state[WEIGHT]) * params_D
        return mixed_D.unsqueeze(0)

    return Algorithm(init_client=init, local_memory=local_memory, finish=finish, personal=personal)
