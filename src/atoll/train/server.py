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
from atoll.core.messages import Aggregate, Broadcast, State, Update
from atoll.core.seeds import generator
from atoll.train.job import Job


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


def empty_update(job: Job) -> Update:
    """The stacked update of no client: it has the layout of what the algorithm sends, and no rows."""
    first_D, one = job.first_D, torch.ones((), dtype=job.spec.dtype)
    server = job.algorithm.init_server(first_D)

    def unknown(*args: Any) -> Tensor:
        raise PlanError(
            "what this algorithm sends cannot be laid out without data, which a private round of nobody needs: "
            "let its finish look at the delta, the task's numbers and its state only"
        )

    sent = Broadcast(first_D, job.algorithm.broadcast(first_D, server))
    state = job.algorithm.init_client(first_D)
    order = LocalTask(sent, state, one, one, one, unknown, unknown, unknown, one)
    update, _ = job.algorithm.finish(torch.zeros_like(first_D), order)
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


def server_task(job: Job, version: int, num_clients: int) -> ServerTask:
    """What the server's step may look at beside the aggregate."""

    def outputs(params_D: Tensor, x: Tensor) -> Tensor:
        views = job.spec.views(params_D)
        views |= {slot.name: views[slot.name].detach() for slot in job.spec.buffers}  # statistics: no slope
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
