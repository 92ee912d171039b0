"""Steps of gradient descent on the client's own samples, with the slots of the algorithm. Shapes: C clients."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import final

import torch
from torch import Tensor, nn

from atoll.core.algorithm import Adapt, Algorithm, LocalTask
from atoll.core.client_work import ClientWork, Samples, Sums, Trained
from atoll.core.messages import Broadcast, State, Task, Update
from atoll.train.evaluate import evaluate_clients, evaluate_samples, evaluating
from atoll.train.job import Job
from atoll.train.loop import Workspace, train_client, workspace
from atoll.train.loop_worker import LoopWorker, Started

ADAPTING = 1 << 31
"""In place of the number of an attempt, where a client adapts a model: no run comes so far."""


def sgd() -> ClientWork:
    """Train the plan's model by the local loop, as `local`, `loss` and the algorithm say."""
    return ClientWork(open=SgdWorker, uses_algorithm=True, stackable=True)


@final
class SgdWorker(LoopWorker):
    """One working model, bound to a flat vector when it is first used."""

    def __init__(self, job: Job, space: Workspace | None = None) -> None:
        self.job = self.inner = job
        self._space = space

    @property
    def space(self) -> Workspace:
        """The working model; bound anew when another worker has bound it to its own vector."""
        if self._space is None or not self._space.is_bound():
            self._space = workspace(self.job)
        return self._space

    def train(self, task: Task, sent: Broadcast, memory: State, samples: Samples) -> Trained:
        """Take the steps of a task; an algorithm that needs it is told the model's loss on all samples first."""
        [first] = self._first_losses([task], [sent])
        return train_client(self.job, self.space, task, sent, memory, first)

    def begin(self, tasks: Sequence[Task], sent: Sequence[Broadcast], memories: Sequence[State]) -> Started:
        """Give the loop what was sent, and the losses that an algorithm needs."""
        return Started(list(sent), list(memories), self._first_losses(tasks, sent), {})

    def end(self, update: Update, states: State, started: Started) -> tuple[Update, State]:
        """Send what the loop gave."""
        return update, states

    def evaluate(self, params_D: Tensor, memory: State, samples: Samples) -> Sums:
        """Measure a model by the plan's metrics, and how often an attack's trigger works."""
        return evaluate_samples(self.job, self.space, params_D, memory, *samples.load(), groups=samples.groups)

    def own(self, params_D: Tensor, memory: State, client: int) -> tuple[Tensor, State]:
        """Return the model of a client as flat vectors: by its algorithm, from what all share and what it remembers."""
        job, algorithm = self.job, self.job.algorithm
        if not job.personal:
            return params_D, {}
        if algorithm.personal is not None:
            params_D, memory = self._personal(algorithm.personal, params_D, memory, client)
        if algorithm.adapt is not None:
            params_D, memory = adapted(job, self.space, params_D, memory, client, algorithm.adapt)
        return params_D, memory

    def arrived(self, sent: Broadcast, client: int, steps: int) -> tuple[Tensor, State]:
        """Return the model of a new client after steps on its training samples; at 0 that which it gets on arrival.

        Where its algorithm makes models of what clients remember, they are steps of a task of the algorithm itself,
        from fresh memory; where clients keep parameters, plain steps of these alone; else plain steps of the model.
        """
        job, algorithm, params_D = self.job, self.job.algorithm, self.job.model_of(sent)
        if algorithm.personal is None:
            by = Adapt(steps, None if algorithm.adapt is None else algorithm.adapt.lr)
            return adapted(job, self.space, params_D, {}, client, by, kept_alone=bool(job.spec.kept))
        memory = algorithm.init_client(sent.params_D)
        if steps:
            alone = SgdWorker(_alone(job, Adapt(steps)), self.space)
            samples = job.federation.client_samples(client)
            memory = {**memory, **alone.train(Task(client, 0, ADAPTING), sent, memory, samples).state}
        return self._personal(algorithm.personal, params_D, memory, client)

    def _personal(
        self, personal: Callable[[Tensor, State], Tensor], params_D: Tensor, memory: State, client: int
    ) -> tuple[Tensor, State]:
        """Return the model that a client makes of the shared one and its memory, and that memory."""
        shared_D = self.job.trainable(params_D)
        memory = {**self.job.algorithm.init_client(shared_D), **memory}
        models = [torch.cat([row, params_D[len(shared_D) :]]) for row in personal(shared_D, memory)]
        return models[0] if len(models) == 1 else self._best(models, memory, client), memory

    def _best(self, models: Sequence[Tensor], memory: State, client: int) -> Tensor:
        """Return the model with the least loss on a client's validation samples, the first of equals."""
        job, losses = self.job, []
        x, y = job.federation.validation_samples(client).load()
        for params_D in models:
            with evaluating(job, self.space, params_D, memory):
                losses.append(float(job.loss(self.space.model(job.inputs(x)), y).cpu().double().mean()))
        return models[min(range(len(models)), key=lambda place: (math.isnan(losses[place]), losses[place]))]

    def _first_losses(self, tasks: Sequence[Task], sent: Sequence[Broadcast]) -> list[float]:
        """Return the loss of the model that each client got, on its training samples; NaN if nobody needs it."""
        if not self.job.algorithm.needs_loss:
            return [math.nan] * len(tasks)
        losses: dict[Task, float] = {}
        for version in sorted({task.version for task in tasks}):
            together = [task for task in tasks if task.version == version]
            model_M = self.job.model_of(next(s for s, t in zip(sent, tasks, strict=True) if t.version == version))
            clients = [task.client for task in together]
            scores_C2 = evaluate_clients(self.job, self.space, model_M, clients, on_training_data=True)
            losses |= dict(zip(together, scores_C2[:, 1].tolist(), strict=True))
        return [losses[task] for task in tasks]


def adapted(
    job: Job, space: Workspace, params_D: Tensor, memory: State, client: int, by: Adapt, *, kept_alone: bool = False
) -> tuple[Tensor, State]:
    """Return a model and what a client keeps of it after steps on its training samples, of which nothing is sent.

    They are plain steps of the plan's optimiser, and their batches are the same each time. With `kept_alone` what is
    shared stays as it is, statistics too.
    """
    if not by.steps:
        return params_D, memory
    alone = replace(_alone(job, by), algorithm=Algorithm(moves=_kept_alone if kept_alone else None))
    sent = alone.broadcast(params_D, {})
    done = train_client(alone, space, Task(client, 0, ADAPTING), sent, memory)
    return params_D if kept_alone else space.params_D.clone(), {**memory, **done.state}


def _alone(job: Job, by: Adapt) -> Job:
    """Return the job of a client that takes these steps for itself."""
    local = replace(job.local, epochs=None, steps=by.steps, lr=by.lr or job.local.lr)
    return replace(job, local=local, schedule=lambda version: 1.0, mechanism=None, attack=None)


def _kept_alone(task: LocalTask) -> tuple[Tensor, Tensor]:
    return torch.tensor(False), torch.tensor(True)


def shared_tensors(job: Job, model: nn.Module) -> State:
    """Return the named tensors of a model without those that clients keep."""
    if not job.spec.kept:
        return model.state_dict()
    kept = {slot.name for slot in job.spec.kept} | set(job.local_buffers)
    memory = {tensor.data_ptr() for name, tensor in model.state_dict().items() if name in kept}
    return {name: tensor for name, tensor in model.state_dict().items() if tensor.data_ptr() not in memory}
