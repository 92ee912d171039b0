"""The server's side of a commit: from folded updates to what the algorithm's step looks at.

Shapes: D parameters, S statistics, B values of buffers: statistics, then what the server alone moves.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.func import functional_call

from atoll.core.aggregator import rows_of
from atoll.core.algorithm import PublicSamples, ServerTask, add_delta
from atoll.core.messages import HELD, STATISTICS, Aggregate, State, Update
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
    return (aggregate._replace(updates=rows) if job.sees_updates else aggregate), memory


def stepped(
    job: Job, model_M: Tensor, aggregate: Aggregate, server: State, version: int, num_clients: int, share: float = 1.0
) -> tuple[Tensor, State]:
    """Return the next model and what the algorithm's server remembers.

    The algorithm moves the parameters. Statistics move by the clients' mean change, or by a `share` of it, whatever the
    algorithm's momentum and rate; variances stay at least 0, whatever clients sent. Buffers that the server alone moves
    are part of what the algorithm's step gets and returns as the server's memory, and of the model elsewhere.
    """
    if job.algorithm.server_step is add_delta and not job.spec.buffers:  # a task would cost more than the step
        return (job.server_lr * aggregate.delta_D).add_(model_M), server
    if not job.spec.buffers:
        return job.algorithm.server_step(model_M, aggregate, server, server_task(job, version, num_clients))
    old_B = model_M[job.spec.num_trainable :]
    new_B = old_B.clone()
    if num := job.spec.num_statistics:
        new_B[:num] += share * aggregate.aux[STATISTICS]
    for name, values in job.spec.buffer_views(new_B).items():
        if name.endswith("running_var"):
            values.clamp_(min=0)
    task = server_task(job, version, num_clients, old_B, new_B)
    held = {HELD: new_B[num:].clone()} if job.spec.num_held else {}
    params_D, after = job.algorithm.server_step(job.trainable(model_M), aggregate, {**server, **held}, task)
    if held:
        new_B[num:] = after[HELD]
        after = {name: value for name, value in after.items() if name != HELD}
    return torch.cat([params_D, new_B]), after


def server_task(
    job: Job, version: int, num_clients: int, old_B: Tensor | None = None, new_B: Tensor | None = None
) -> ServerTask:
    """What the server's step may look at beside the aggregate; its model's buffers are those before and after."""

    def outputs(params_D: Tensor, x: Tensor, change_S: Tensor | None = None) -> Tensor:
        views, buffers = job.spec.without_buffers.views(params_D), new_B
        if change_S is not None and old_B is not None:
            buffers = torch.cat([old_B[: len(change_S)] + change_S, old_B[len(change_S) :]])
        if buffers is not None:
            views |= job.spec.buffer_views(buffers)
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
        spec=job.spec,
    )


def public_samples(job: Job) -> PublicSamples | None:
    """The plan's public samples without their labels, in the model's dtype."""
    public = job.federation.public
    if public is None:
        return None

    def features(indices: np.ndarray) -> Tensor:
        return job.inputs(job.federation.public_features(indices))

    return PublicSamples(len(public.x), features)
