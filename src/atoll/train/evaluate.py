"""Evaluation: the central test set in slices, and every client's own data. Shapes: K classes, C clients, B samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn

from atoll.core.client_work import Sums
from atoll.core.messages import State
from atoll.core.seeds import derive
from atoll.data.targets import CLASSIFICATION
from atoll.train.devices import WITHOUT_DOUBLE
from atoll.train.job import Job
from atoll.train.loop import BUFFER, Workspace
from atoll.train.seeded import seeded

SLICE = 1000
"""Samples that are evaluated together: fixed, so that sums do not depend on who adds them."""
MOST_OUTPUTS = 1 << 26
"""Outputs that a model makes at once: a long vocabulary at every position lets fewer samples go through together."""


def evaluate_samples(
    job: Job,
    space: Workspace,
    params_D: Tensor,
    memory: State,
    x: Tensor,
    y: Tensor,
    *,
    groups: np.ndarray | None = None,
) -> Sums:
    """Return the parts of the plan's metrics on some samples, and how often an attack's trigger works."""
    parts = []
    with evaluating(job, space, params_D, memory):
        for part in _passes(job, y):
            outputs, some = space.model(job.inputs(x[part])), None if groups is None else groups[part]
            parts.append(_measured(job, outputs, y[part], some))
        return {**(parts[0] if len(parts) == 1 else job.measures.merge(parts)), **_fooled(job, space, x, y)}


def _measured(job: Job, outputs: Tensor, y: Tensor, groups: np.ndarray | None = None) -> State:
    """Return the part of some samples, measured where they are if sums of float64 can be made there."""
    measured = outputs, y, job.loss(outputs, y)
    if job.device.type in WITHOUT_DOUBLE:
        measured = outputs.cpu(), y.cpu(), measured[2].cpu()
    return job.measures.add(*measured, groups)


def _passes(job: Job, y: Tensor) -> list[slice]:
    """Return which samples go through the model together: all, or as many as MOST_OUTPUTS allows."""
    positions = y[:1].numel() if job.federation.dataset.tokens else 1
    width = max(1, MOST_OUTPUTS // max(1, positions * job.federation.dataset.num_outputs))
    return [slice(start, start + width) for start in range(0, max(1, len(y)), width)]


def _fooled(job: Job, space: Workspace, x: Tensor, y: Tensor) -> Sums:
    """Count the samples of other classes that the model puts into the attack's target class by its trigger."""
    attack = job.attack
    if attack is None or attack.trigger is None or attack.target is None:
        return {}
    if job.federation.dataset.tokens or y.dim() > 1:
        return {}
    others = y.ne(attack.target)
    if not bool(others.any()):
        return {"fooled": torch.tensor(0), "others": torch.tensor(0)}
    hits = space.model(job.inputs(attack.trigger(x[others]))).argmax(-1) == attack.target
    return {"fooled": hits.sum(), "others": others.sum()}


def evaluate_clients(
    job: Job,
    space: Workspace,
    params_D: Tensor,
    clients: list[int],
    *,
    on_training_data: bool = False,
    outputs: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Return accuracy and mean loss (C, 2) of each client on its own evaluation samples, several clients in one pass.

    Where right answers are not what is counted, the first is NaN. `outputs` gives the model's outputs for indices of
    training samples, if the working model need not.
    """
    federation = job.federation
    pick = federation.train_indices if on_training_data else federation.evaluation_indices
    indices = [pick(client) for client in clients]
    owner = torch.from_numpy(np.repeat(np.arange(len(clients)), [len(i) for i in indices]))
    joined = torch.from_numpy(np.concatenate(indices))
    sums_C3 = torch.zeros(len(clients), 3, dtype=torch.float64)
    with evaluating(job, space, params_D):
        for start in range(0, len(joined), SLICE):
            part, who = joined[start : start + SLICE], owner[start : start + SLICE]
            y = federation.targets(part)
            found = (
                space.model(job.inputs(federation.features(federation.take(part))))
                if outputs is None
                else outputs(part)
            )
            loss_B, right_B = job.loss(found, y).cpu(), torch.full((len(y),), torch.nan, dtype=torch.float64)
            if counts_right(job):
                right_B = (found.argmax(-1) == y).cpu().double().reshape(len(y), -1).mean(1)
            sums_C3.index_add_(0, who, torch.stack([right_B, loss_B.double(), torch.ones_like(right_B)], dim=1))
    return sums_C3[:, :2] / sums_C3[:, 2:]


def ready_slices(job: Job, client: int) -> list[tuple[Tensor, Tensor]]:
    """What a client, or the server, trains on, as the model wants it: for who measures many models on it."""
    federation = job.federation
    parts = torch.split(torch.from_numpy(federation.train_indices(client)), SLICE)
    return [(job.inputs(federation.features(federation.take(part))), federation.targets(part)) for part in parts]


def evaluate_ready(
    job: Job, space: Workspace, params_D: Tensor, slices: list[tuple[Tensor, Tensor]]
) -> tuple[float, float]:
    """Return the main figure and the mean loss on samples that `ready_slices` made."""
    parts = []
    with evaluating(job, space, params_D):
        for x, y in slices:
            for part in _passes(job, y):
                outputs = space.model(x[part])
                parts.append(_measured(job, outputs, y[part]))
    return job.measures.main_and_loss(job.measures.merge(parts))


def counts_right(job: Job) -> bool:
    """Return whether the main figure of a model is its share of right answers, each sample counting alike."""
    return job.problem.kind == CLASSIFICATION and next(iter(job.measures.metrics)) in ("confusion", "accuracy")


@contextmanager
def evaluating(job: Job, space: Workspace, params_D: Tensor, memory: State | None = None) -> Iterator[None]:
    """Put parameters into the workspace and the model into evaluation mode, and back.

    `memory` is that of the client whose own model is evaluated. Where batch-norm statistics stay with the clients, a
    shared model has none, nor has that of a client that never trained: the batch's own are used instead. A model that
    draws or counts does so from the same start each time, so that it does not matter who evaluates.
    """
    memory = memory or {}
    space.restore(params_D, memory)
    space.model.eval()
    kept = {name: space.model.get_buffer(name).clone() for name in job.local_buffers}
    if not all(f"{BUFFER}{name}" in memory for name in kept):
        for module in space.model.modules():
            if isinstance(module, nn.modules.batchnorm._NormBase):
                module.train()
    try:
        with torch.inference_mode(), seeded(derive(job.seed, "evaluation"), job.device):
            yield
    finally:
        for name, value in kept.items():
            space.model.get_buffer(name).copy_(value)
        space.model.train()
