"""Evaluation: the central test set in slices, and every client's own data. Shapes: K classes, C clients, B samples."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn

from atoll.core.client_work import Sums
from atoll.core.messages import State
from atoll.core.seeds import derive
from atoll.train.job import Job
from atoll.train.loop import Workspace
from atoll.train.seeded import seeded

SLICE = 1000
"""Samples that are evaluated together: fixed, so that sums do not depend on who adds them."""


def evaluate_samples(job: Job, space: Workspace, params_D: Tensor, memory: State, x: Tensor, y: Tensor) -> Sums:
    """Return confusion matrix and summed loss on some samples, and how often an attack's trigger works."""
    with evaluating(job, space, params_D, memory):
        outputs = space.model(job.inputs(x))
        predicted_B, loss_B = outputs.argmax(-1), job.loss(outputs, y)
        fooled = _fooled(job, space, x, y)
    num_classes = max(job.federation.dataset.num_classes, outputs.shape[-1])
    pairs = y.reshape(-1) * num_classes + predicted_B.reshape(-1)
    confusion_KK = torch.bincount(pairs, minlength=num_classes**2).view(num_classes, num_classes)
    return {"confusion": confusion_KK, "loss": loss_B.double().sum(), "count": torch.tensor(len(y)), **fooled}


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
    job: Job, space: Workspace, params_D: Tensor, clients: list[int], *, on_training_data: bool = False
) -> Tensor:
    """(C, 2): accuracy and mean loss of each client on its own evaluation samples, several clients in one pass."""
    federation = job.federation
    pick = federation.train_indices if on_training_data else federation.evaluation_indices
    indices = [pick(client) for client in clients]
    owner = torch.from_numpy(np.repeat(np.arange(len(clients)), [len(i) for i in indices]))
    joined = torch.from_numpy(np.concatenate(indices))
    sums_C3 = torch.zeros(len(clients), 3, dtype=torch.float64)
    with evaluating(job, space, params_D):
        for start in range(0, len(joined), SLICE):
            part, who = joined[start : start + SLICE], owner[start : start + SLICE]
            x, y = federation.take(part), federation.train_y[part]
            predicted_B, loss_B = _predict(job, space, x, y)
            right_B = (predicted_B == y).double().reshape(len(y), -1).mean(1)
            sums_C3.index_add_(0, who, torch.stack([right_B, loss_B.double(), torch.ones_like(right_B)], dim=1))
    return sums_C3[:, :2] / sums_C3[:, 2:]


def ready_slices(job: Job, client: int) -> list[tuple[Tensor, Tensor]]:
    """What a client, or the server, trains on, as the model wants it: for who measures many models on it."""
    federation = job.federation
    parts = torch.split(torch.from_numpy(federation.train_indices(client)), SLICE)
    return [(job.inputs(federation.features(federation.take(part))), federation.train_y[part]) for part in parts]


def evaluate_ready(
    job: Job, space: Workspace, params_D: Tensor, slices: list[tuple[Tensor, Tensor]]
) -> tuple[float, float]:
    """Accuracy and mean loss on samples that `ready_slices` made."""
    right = loss = 0.0
    with evaluating(job, space, params_D):
        for x, y in slices:
            outputs = space.model(x)
            right += float((outputs.argmax(-1) == y).double().reshape(len(y), -1).mean(1).sum())
            loss += float(job.loss(outputs, y).double().sum())
    num = sum(len(y) for _, y in slices)
    return right / num, loss / num


def _predict(job: Job, space: Workspace, raw: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    outputs = space.model(job.inputs(job.federation.features(raw)))
    return outputs.argmax(-1), job.loss(outputs, y)


@contextmanager
def evaluating(job: Job, space: Workspace, params_D: Tensor, memory: State | None = None) -> Iterator[None]:
    """Put parameters into the workspace and the model into evaluation mode, and back.

    `memory` is that of the client whose own model is evaluated. Where batch-norm statistics stay with the clients, a
    shared model has none: the batch's own are used instead. A model that draws or counts does so from the same start
    each time, so that it does not matter who evaluates.
    """
    space.restore(params_D, memory or {})
    space.model.eval()
    kept = {name: space.model.get_buffer(name).clone() for name in job.local_buffers}
    if kept and not memory:
        for module in space.model.modules():
            if isinstance(module, nn.modules.batchnorm._NormBase):
                module.train()
    try:
        with torch.inference_mode(), seeded(derive(job.seed, "evaluation")):
            yield
    finally:
        for name, value in kept.items():
            space.model.get_buffer(name).copy_(value)
        space.model.train()
