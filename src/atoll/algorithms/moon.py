"""MOON."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor
from torch.nn.functional import cosine_similarity, softplus

from atoll.core.algorithm import Algorithm, Batch, LocalTask
from atoll.core.messages import State, Update
from atoll.core.options import NotNegative, Positive


def moon(mu: NotNegative = 1.0, temperature: Positive = 0.5) -> Algorithm:
    """Pull a client's features to the broadcast model's and away from its own previous ones (Li et al. 2021).

    arXiv:2103.16257, eq. 3: adds mu * -log(e^(s_glob / t) / (e^(s_glob / t) + e^(s_prev / t))) to the loss, where s is
    the cosine similarity of the inputs of the last linear layer. The paper adds a projection head there; put one into
    the model if you want it.
    """

    def init_client(params_D: Tensor) -> State:
        return {"previous": params_D}

    def local_loss(loss: Tensor, params: Mapping[str, Tensor], batch: Batch, task: LocalTask) -> Tensor:
        current = task.features(params, batch.x).flatten(1)
        broadcast = task.features(task.broadcast.params_D, batch.x).flatten(1).detach()
        previous = task.features(task.state["previous"], batch.x).flatten(1).detach()
        gap = cosine_similarity(current, previous, dim=1) - cosine_similarity(current, broadcast, dim=1)
        return loss + mu * (softplus(gap / temperature) * batch.weight).sum()

    def finish(delta_D: Tensor, task: LocalTask) -> tuple[Update, State]:
        return Update(delta_D, task.num_samples, {}), {"previous": task.broadcast.params_D + delta_D}

    return Algorithm(init_client=init_client, local_loss=local_loss, finish=finish)
