"""The server's side of a commit: from folded updates to what the algorithm's step looks at. Shapes: D parameters."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.func import functional_call

from atoll.core.aggregator import rows_of
from atoll.core.algorithm import LocalTask, PublicSamples, ServerTask
from atoll.core.errors import PlanError
from atoll.core.messages import STATISTICS, Aggregate, Broadcast, State, Update
from atoll.core.seeds import generator
from atoll.train.job import Job
from atoll.train.loop import with_statistics


def aggregated(job: Job, folded: State, memory: State, own: Update | None = None) -> tuple[Aggregate, State]:
    """Let the plan's rule make one of the updates, which come as rows where they had to be seen one by one first.

    `own` is the server's own update, for a rule that compares with it.
    """
    rule, rows = job.aggregator, rows_of(folded) if job.wants_rows else None
    if rows is not None:
        folded = rule.add(rule.zero(), rows)
    if rule.trust is not None and own is not None:
        folded = rule.trust(folded, own)
    aggregate, memory = rule.finish(folded, memory)
    return (aggregate._replace(updates=rows) if job.algorithm.needs_updates else aggregate), memory


def first_server(job: Job, model_M: Tensor) -> State:
    """Return what the algorithm's server remembers before the first round, which starts from this model."""
    return job.algorithm.init_server(job.trainable(model_M))


def broadcast_of(job: Job, model_M: Tensor, server: State) -> Broadcast:
    """Return what clients are sent of a model."""
    return job.broadcast(model_M, job.algorithm.broadcast(job.trainable(model_M), server))


def stepped(
    job: Job, model_M: Tensor, aggregate: Aggregate, server: State, version: int, num_clients: int, share: float = 1.0
) -> tuple[Tensor, State]:
    """Return the next model and what the algorithm's server remembers.

    The algorithm moves the parameters. Statistics move by the clients' mean change, or by a `share` of it, whatever the
    algorithm's momentum and rate; variances stay at least 0, whatever clients sent.
    """
    if not job.spec.buffers:
        return job.algorithm.server_step(model_M, aggregate, server, server_task(job, version, num_clients))
    old_S = model_M[job.spec.num_trainable :]
    statistics_S = old_S + share * aggregate.aux[STATISTICS]
    for name, values in job.spec.buffer_views(statistics_S).items():
        if name.endswith("running_var"):
            values.clamp_(min=0)
    task = server_task(job, version, num_clients, old_S, statistics_S)
    params_D, server = job.algorithm.server_step(job.trainable(model_M), aggregate, server, task)
    return torch.cat([params_D, statistics_S]), server


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


def server_task(
    job: Job, version: int, num_clients: int, old_S: Tensor | None = None, new_S: Tensor | None = None
) -> ServerTask:
    """What the server's step may look at beside the aggregate; its model's statistics are those before and after."""

    def outputs(params_D: Tensor, x: Tensor, change_S: Tensor | None = None) -> Tensor:
        views = job.spec.without_buffers.views(params_D)
        statistics_S = new_S if change_S is None or old_S is None else old_S + change_S
        if statistics_S is not None:
            views |= job.spec.buffer_views(statistics_S)
        job.model.eval()
        try:
            found: Tensor = functional_call(job.model, views, (x,))
        finally:
            job.model.train()
        return found

    return ServerTask(
        lr=job.server_lr,
        round=version,
        num_clients=num_clients,
        outputs=outputs,
        public=public_samples(job),
        rng=generator(job.seed, "server step", version),
    )


def public_samples(job: Job) -> PublicSamples | None:
    """The plan's public samples without their labels, in the model's dtype."""
    public = job.federation.public
    if public is None:
        return None

    def features(indices: np.ndarray) -> Tensor:
        return job.inputs(job.federation.public_features(indices))

    return PublicSamples(len(public.x), features)
