"""Steps of gradient descent on the client's own samples, with the slots of the algorithm. Shapes: C clients."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import final

import torch
from torch import Tensor, nn

from atoll.core.client_work import ClientWork, Samples, Sums, Trained, Worker
from atoll.core.messages import KEPT, Broadcast, State, Task
from atoll.core.params import load
from atoll.train.evaluate import evaluate_clients, evaluate_samples
from atoll.train.job import Job
from atoll.train.loop import BUFFER, Workspace, train_client, workspace


def sgd() -> ClientWork:
    """Train the plan's model by the local loop, as `local`, `loss` and the algorithm say."""
    return ClientWork(open=SgdWorker, uses_algorithm=True, stackable=True)


@final
class SgdWorker(Worker):
    """One working model, bound to a flat vector when it is first used."""

    def __init__(self, job: Job, space: Workspace | None = None) -> None:
        self.job, self._space = job, space

    @property
    def space(self) -> Workspace:
        """The working model; bound anew when another worker has bound it to its own vector."""
        if self._space is None or not self._space.is_bound():
            self._space = workspace(self.job)
        return self._space

    def train(self, task: Task, sent: Broadcast, memory: State, samples: Samples) -> Trained:
        """Take the steps of a task; an algorithm that needs it is told the model's loss on all samples first."""
        [first] = self.first_losses([task], {task.version: sent})
        return train_client(self.job, self.space, task, sent, memory, first)

    def evaluate(self, params_D: Tensor, memory: State, samples: Samples) -> Sums:
        """Measure a model by the plan's metrics, and how often an attack's trigger works."""
        own = memory if self.job.personal else {}
        return evaluate_samples(self.job, self.space, params_D, own, *samples.load(), groups=samples.groups)

    def first_losses(self, tasks: Sequence[Task], sent: Mapping[int, Broadcast]) -> list[float]:
        """Return the loss of the model that each client got, on its training samples; NaN if nobody needs it."""
        if not self.job.algorithm.needs_loss:
            return [math.nan] * len(tasks)
        losses: dict[Task, float] = {}
        for version in sorted({task.version for task in tasks}):
            together = [task for task in tasks if task.version == version]
            model_M, clients = self.job.model_of(sent[version]), [task.client for task in together]
            scores_C2 = evaluate_clients(self.job, self.space, model_M, clients, on_training_data=True)
            losses |= dict(zip(together, scores_C2[:, 1].tolist(), strict=True))
        return [losses[task] for task in tasks]


def kept_model(
    job: Job, makers: Sequence[Callable[[], nn.Module]], client: int, params_D: Tensor, memory: State
) -> nn.Module:
    """Return a client's own model: what all share, and what it keeps."""
    model = load(makers[0](), job.spec, params_D, memory.get(KEPT, job.first_kept_K))
    with torch.no_grad():
        for name in job.local_buffers:
            if f"{BUFFER}{name}" in memory:
                model.get_buffer(name).copy_(memory[f"{BUFFER}{name}"])
    return model


def shared_tensors(job: Job, model: nn.Module) -> State:
    """Return the named tensors of a model without those that clients keep."""
    if not job.spec.kept:
        return model.state_dict()
    kept = {slot.name for slot in job.spec.kept} | set(job.local_buffers)
    memory = {tensor.data_ptr() for name, tensor in model.state_dict().items() if name in kept}
    return {name: tensor for name, tensor in model.state_dict().items() if tensor.data_ptr() not in memory}
