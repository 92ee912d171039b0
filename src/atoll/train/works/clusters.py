"""Several models travel, and each client trains the one that fits its samples best.

Shapes: K clusters, D values of one model, C clients. What travels is one vector (K * D,). Batch-norm statistics stay
with the clients.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Annotated, final

import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot

from atoll.core.algorithm import Adapt
from atoll.core.client_work import ClientWork, Layout, Samples, Sums, Trained
from atoll.core.messages import MEMBERS, Broadcast, State, Task, Update
from atoll.core.options import Range
from atoll.core.params import ParamSpec
from atoll.train.evaluate import evaluate_clients, evaluate_samples
from atoll.train.job import Job
from atoll.train.loop import Workspace, train_client, workspace
from atoll.train.loop_worker import LoopWorker, Started
from atoll.train.own_models import loaded
from atoll.train.works.sgd import adapted


def clusters(num: Annotated[int, Range(1, 1000)] = 2) -> ClientWork:
    """Train the one of `num` models that has the least loss on the client's training samples.

    The client's side of IFCA (Ghosh et al. 2020, arXiv:2006.04088, algorithm 1).
    """
    return ClientWork(
        open=ClusterWorker,
        layout=_layout,
        jobs=lambda job: job.architectures[:1],
        own_model=_own_model,
        copies=num,
        stackable=True,
    )


def _layout(job: Job) -> Layout:
    """Lay out the models one after another."""
    spec, slots = job.architectures[0].spec, []
    for number in range(len(job.architectures)):
        shift = number * spec.num_params
        slots += [each._replace(name=f"{number}.{each.name}", offset=each.offset + shift) for each in spec.slots]
    first_D = torch.cat([each.first_D for each in job.architectures])
    members = {MEMBERS: first_D.new_zeros(len(job.architectures))}
    return Layout(ParamSpec(tuple(slots), len(first_D), spec.dtype), first_D, members)


def _own_model(
    job: Job, makers: Sequence[Callable[[], nn.Module]], client: int, params_D: Tensor, memory: State
) -> nn.Module:
    inner = job.architectures[0]
    return loaded(inner, makers[0](), _model(job, params_D, memory), memory)


def _models(job: Job, params_D: Tensor) -> Tensor:
    """Return the models of all clusters, (K, D)."""
    return params_D.view(len(job.architectures), -1)


def _model(job: Job, params_D: Tensor, memory: State) -> Tensor:
    """Return the model of a client's cluster, (D,); the first one for nobody in particular."""
    return _models(job, params_D)[int(memory[MEMBERS].argmax()) if MEMBERS in memory else 0]


@final
class ClusterWorker(LoopWorker):
    """One working model for all clusters."""

    def __init__(self, job: Job) -> None:
        self.job, self.inner = job, job.architectures[0]
        self._space: Workspace | None = None

    @property
    def space(self) -> Workspace:
        """The working model; bound anew when another worker has bound it to its own vector."""
        if self._space is None or not self._space.is_bound():
            self._space = workspace(self.inner)
        return self._space

    def train(self, task: Task, sent: Broadcast, memory: State, samples: Samples) -> Trained:
        """Take the steps of a task on the model of the client's cluster."""
        started = self.begin([task], [sent], [memory])
        done = train_client(self.inner, self.space, task, started.sent[0], memory)
        stacked = {name: value.unsqueeze(0) for name, value in done.state.items()}
        update, states = self.end(done.update.alone(), stacked, started)
        return Trained(update.rows(0), {name: value[0] for name, value in states.items()}, done.loss)

    def evaluate(self, params_D: Tensor, memory: State, samples: Samples) -> Sums:
        """Measure the model of a client's cluster."""
        model_D = _model(self.job, params_D, memory)
        return evaluate_samples(self.inner, self.space, model_D, memory, *samples.load(), groups=samples.groups)

    def own(self, params_D: Tensor, memory: State, client: int) -> tuple[Tensor, State]:
        """Return all models, and which of them is the client's now."""
        [members] = self._members(params_D, [client])
        return params_D, {**memory, MEMBERS: members}

    def arrived(self, sent: Broadcast, client: int, steps: int) -> tuple[Tensor, State]:
        """Return all models, that of the new client's cluster after plain steps on its training samples."""
        [members] = self._members(sent.params_D, [client])
        models_KD, cluster = _models(self.job, sent.params_D).clone(), int(members.argmax())
        model_D, memory = adapted(self.inner, self.space, models_KD[cluster], {}, client, Adapt(steps))
        models_KD[cluster] = model_D
        return models_KD.view(-1), {**memory, MEMBERS: members}

    def begin(self, tasks: Sequence[Task], sent: Sequence[Broadcast], memories: Sequence[State]) -> Started:
        """Give each client the model of its cluster."""
        members: dict[Task, Tensor] = {}
        for version in sorted({task.version for task in tasks}):
            together = [place for place, task in enumerate(tasks) if task.version == version]
            rows = self._members(sent[together[0]].params_D, [tasks[place].client for place in together])
            members |= {tasks[place]: row for place, row in zip(together, rows, strict=True)}
        members_CK = torch.stack([members[task] for task in tasks])
        picked = [
            Broadcast(_models(self.job, each.params_D)[int(row.argmax())], {})
            for each, row in zip(sent, members_CK, strict=True)
        ]
        inner = [{name: value for name, value in memory.items() if name != MEMBERS} for memory in memories]
        return Started(picked, inner, [math.nan] * len(tasks), {MEMBERS: members_CK})

    def end(self, update: Update, states: State, started: Started) -> tuple[Update, State]:
        """Put each client's update in the place of its cluster."""
        members_CK = started.notes[MEMBERS]
        delta_CKD = members_CK.unsqueeze(2) * update.delta_D.unsqueeze(1)
        return Update(delta_CKD.flatten(1), update.weight, {MEMBERS: members_CK}), {**states, MEMBERS: members_CK}

    def _members(self, params_D: Tensor, clients: list[int]) -> Tensor:
        """Return which model has the least loss on the training samples of each client, as (C, K) of 0 and 1."""
        models_KD = _models(self.job, params_D)
        scores = [evaluate_clients(self.inner, self.space, each, clients, on_training_data=True) for each in models_KD]
        best_C = torch.stack(scores)[:, :, 1].nan_to_num(torch.inf).argmin(0)
        return one_hot(best_C, len(models_KD)).to(params_D)
