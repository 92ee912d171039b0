"""The server's side of a commit: from folded updates to what the algorithm's step looks at. Shapes: D parameters."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.func import functional_call

from atoll.core.aggregator import rows_of
from atoll.core.algorithm import PublicSamples, ServerTask
from atoll.core.messages import STATISTICS, Aggregate, State, Update
from atoll.core.seeds import generator
from atoll.train.job import Job


def aggregated(job: Job, folded: State, memory: State, own: Update | None = None) -> tuple[Aggregate, State]:
    """Let the plan's rule make one of the updates, which come as rows where they had to be seen one by one first.

    `own` is the server's own update, for a rule that compares with it.
    """
    rule, rows = job.aggregator, rows_of(folded) if job.wants_rows else None
    if rows is not None:
        folded = rule.add(rule.zero(), rows)
    if rule.add_server_update is not None and own is not None:
        folded = rule.add_server_update(folded, own)
    aggregate, memory = rule.finish(folded, memory)
    return (aggregate._replace(updates=rows) if job.algorithm.needs_updates else aggregate), memory


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
