"""Groups of clients trained by kernels, one client after another. Shapes: G clients, D parameters."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from atoll.core.algorithm import Drift, LocalTask
from atoll.core.client_work import Sums
from atoll.core.messages import Broadcast, State, Task
from atoll.data.targets import CLASSIFICATION
from atoll.train.batches import client_batches
from atoll.train.job import Job
from atoll.train.kernels.build import library
from atoll.train.kernels.chain import Chain, Data, Step, Unsuited, layers_of
from atoll.train.losses.cross_entropy import plain_cross_entropy
from atoll.train.stack import StackedTrained, finished, fixed_of, unavailable

MOST_ROOM = 1 << 26
"""How many numbers kernels may work with beside the parameters: 256 MB of them."""

MEASURED = 64
"""So many samples are measured at once: weights that no cache holds are then read seldom."""


class KernelTrainer:
    """Trains up to `size` clients in a group; raises Unsuited or Unavailable where kernels cannot do a job."""

    def __init__(self, job: Job, *, size: int) -> None:
        suits(job)
        layers = layers_of(job.model, job.spec, tuple(job.federation.dataset.input_shape))
        if layers[-1].out_c <= int(job.federation.train_y.max()):
            raise Unsuited("there are more classes than outputs")
        room = Chain.room(library(), layers, max(MEASURED, job.batch_size))
        if room > MOST_ROOM:
            raise Unsuited(f"batches of {job.batch_size} need {room * 4 >> 20} MB to work with")
        self.job, self.size = job, size
        self._chain = Chain(library(), layers, job.spec.num_params, job.batch_size)
        self._measuring = Chain(library(), layers, job.spec.num_params, MEASURED)
        self._train_data, self._held = data_of(job, job.federation.train_x, job.federation.train_y)
        self._test_data, self._test_held = data_of(job, job.federation.test_x, job.federation.test_y)

    def train(
        self,
        tasks: list[Task],
        sent: list[Broadcast],
        states: list[State],
        first_losses: list[float],
        drawn: list[list[np.ndarray]] | None = None,
    ) -> StackedTrained:
        """Do several tasks. `drawn` are other batches than the usual."""
        job, algorithm = self.job, self.job.algorithm
        fixed = fixed_of(job, tasks, sent, states, first_losses)
        drifts = [Drift()] * len(tasks)
        if algorithm.drift is not None:
            drifts = [algorithm.drift(_task(*each)) for each in zip(sent, states, fixed.lr_G, strict=True)]
        delta_GD, losses = self._chain.train(
            self._train_data,
            [each.params_D for each in sent],
            [drift.shift_D for drift in drifts],
            drawn or [client_batches(job, task) for task in tasks],
            [self._step(*each) for each in zip(fixed.lr_G.tolist(), drifts, strict=True)],
        )
        update, after = finished(job, delta_GD, fixed, delta_GD)
        return StackedTrained(update=update, states=after, loss_G=torch.tensor(losses, dtype=torch.float32))

    def outputs(self, params_D: Tensor, indices: Tensor, *, test: bool = False) -> Tensor:
        """Return the outputs of a model for training samples, or for those of the test set."""
        data = self._test_data if test else self._train_data
        return self._measuring.outputs(data, indices.numpy(), self._measuring.packed(params_D))

    def evaluate(self, params_D: Tensor, start: int, num: int) -> Sums:
        """Measure a model by the plan's metrics on a slice of the test set."""
        job, federation = self.job, self.job.federation
        stop = min(start + num, federation.dataset.num_test)
        outputs, y = self.outputs(params_D, torch.arange(start, stop), test=True), federation.test_y[start:stop]
        groups = federation.dataset.test_groups
        some = None if groups is None else groups[start:stop]
        return job.measures.add(outputs, y, job.loss(outputs, y), some)

    def _step(self, lr: float, drift: Drift) -> Step:
        """Return how a client's weights are moved."""
        options = self.job.local.optimizer.options
        return Step(
            lr=lr,
            momentum=options.get("momentum", 0.0),
            decay=options.get("weight_decay", 0.0),
            nesterov=bool(options.get("nesterov", False)),
            pull=drift.pull,
        )


def _task(sent: Broadcast, state: State, lr: Tensor) -> LocalTask:
    """What a client's drift may look at."""
    none = torch.tensor(torch.nan)
    return LocalTask(
        broadcast=sent,
        state=state,
        lr=lr,
        num_steps=none,
        num_samples=none,
        outputs=unavailable,
        grad_at=unavailable,
        features=unavailable,
        first_loss=none,
        step=none,
        end_D=sent.params_D,
    )


def suits(job: Job) -> None:
    """Raise Unsuited if clients of a job do something that no kernel does, whatever the model is."""
    algorithm, federation = job.algorithm, job.federation
    slots = (algorithm.local_loss, algorithm.local_memory, algorithm.start, algorithm.moves, algorithm.mask)
    reasons = {
        "clients do something else than steps of gradient descent": not job.work.stackable,
        "kernels are for processors": getattr(getattr(job, "device", None), "type", "cpu") != "cpu",
        "the algorithm has a slot within steps that no kernel knows": any(slot is not None for slot in slots)
        or (algorithm.local_grad is not None and algorithm.drift is None),
        "steps are private": job.private is not None,
        "clients may poison their samples": job.attack is not None and job.attack.data is not None,
        "the model drops units": bool(job.dropout_seeds),
        "the optimiser is not sgd": job.local.optimizer.name != "sgd",
        "the loss is not plain cross entropy": job.loss is not plain_cross_entropy,
        "samples do not have one class each": job.problem.kind != CLASSIFICATION or federation.train_y.dim() != 1,
        "samples are not in memory, or neither bytes nor single precision": federation.dataset.tokens
        or not all(_is_known(x) for x in (federation.train_x, federation.test_x)),
    }
    reason = next((text for text, holds in reasons.items() if holds), None)
    if reason is not None:
        raise Unsuited(reason)
    if federation.train_y.dtype != torch.int64 or int(federation.train_y.min()) < 0:
        raise Unsuited("classes are not whole numbers from 0 on")


def _is_known(features: Any) -> bool:
    return isinstance(features, Tensor) and features.dtype in (torch.uint8, torch.float32)


def data_of(job: Job, features: Any, labels: Tensor) -> tuple[Data, list[Tensor]]:
    """Return where samples and labels lie, and the tensors that this points into."""
    x, y = features.contiguous(), labels.contiguous()
    is_bytes = x.dtype == torch.uint8
    data = Data(
        bytes=x.data_ptr() if is_bytes else None,
        floats=None if is_bytes else x.data_ptr(),
        labels=y.data_ptr(),
        sample=math.prod(x.shape[1:]),
        scale=job.federation.dataset.scale,
        shift=job.federation.dataset.shift,
    )
    return data, [x, y]
