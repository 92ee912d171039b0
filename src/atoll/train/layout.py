"""What travels of a job: the first memory of the server, what is broadcast, and the layout of updates.

Shapes: D parameters, M values of a model.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from atoll.core.algorithm import LocalTask
from atoll.core.errors import PlanError
from atoll.core.messages import Broadcast, State, Update
from atoll.train.job import Job
from atoll.train.loop import with_statistics


def first_server(job: Job, model_M: Tensor) -> State:
    """Return what the algorithm's server remembers before the first round, which starts from this model."""
    return job.algorithm.init_server(job.trainable(model_M))


def broadcast_of(job: Job, model_M: Tensor, server: State) -> Broadcast:
    """Return what clients are sent of a model."""
    return job.broadcast(model_M, job.algorithm.broadcast(job.trainable(model_M), server))


def empty_update(job: Job) -> Update:
    """The stacked update of no client: it has the layout of what the algorithm sends, and no rows."""
    first_D, one = job.trainable(job.first_D), torch.ones((), dtype=job.spec.dtype)

    def unknown(*args: Any) -> Tensor:
        raise PlanError(
            "what this algorithm sends cannot be laid out without data, which a private round of nobody needs: "
            "let its finish look at the delta, the task's numbers and its state only"
        )

    sent = broadcast_of(job, job.first_D, first_server(job, job.first_D))
    state = job.algorithm.init_client(first_D)
    order = LocalTask(sent, state, one, one, one, unknown, unknown, unknown, one)
    update, _ = job.algorithm.finish(torch.zeros_like(first_D), order)
    update = with_statistics(job, update, torch.zeros_like(job.first_D))
    return Update(
        update.delta_D.new_zeros(0, *update.delta_D.shape),
        update.weight.new_zeros(0),
        {name: value.new_zeros(0, *value.shape) for name, value in update.aux.items()},
    )


def layout_of(job: Job) -> Update:
    """An update of zeros: the shape of every update that is due."""
    empty = empty_update(job)
    return Update(
        empty.delta_D.new_zeros(empty.delta_D.shape[1:]),
        empty.weight.new_zeros(()),
        {name: rows.new_zeros(rows.shape[1:]) for name, rows in empty.aux.items()},
    )
