"""Clients that keep models of their own and agree on class scores of public samples.

Shapes: D scores, E parameters of one client's model, B samples a batch, K classes. The parameters are the client's
memory; what travels is a table of scores.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Annotated, NamedTuple, final

import numpy as np
import torch
from torch import Tensor, nn

from atoll.core.client_work import ClientWork, Layout, Samples, Sums, Trained, Worker
from atoll.core.errors import PlanError
from atoll.core.messages import Broadcast, State, Task, Update
from atoll.core.options import Count, at_least
from atoll.core.params import ParamSpec, Slot, load
from atoll.core.seeds import derive, generator
from atoll.train.attributes import as_before
from atoll.train.dropout import set_seed
from atoll.train.evaluate import SLICE, evaluate_samples, evaluating
from atoll.train.job import Job
from atoll.train.loop import Workspace, train_client, workspace
from atoll.train.seeded import seeded

PARAMS = "params"
"""Under this name a client remembers its model."""
Epochs = Annotated[int, at_least(0)]
EXAMPLES = [{}, {"samples": 20, "public_epochs": 1}]


class Passes(NamedTuple):
    """How often a client goes over which samples."""

    epochs: int
    """Passes over the consensus in a round."""
    public_epochs: int
    """Passes over labelled public samples before a client's first round."""
    private_epochs: int
    """Passes over its own samples in a client's first round; 0: as in any other."""


def consensus(
    samples: Count = 1000, epochs: Epochs = 1, public_epochs: Epochs = 0, private_epochs: Epochs = 0
) -> ClientWork:
    """Digest the mean scores of the round before, revisit the client's own samples, and score the next public ones.

    The client's side of FedMD (Li and Wang 2019, arXiv:1910.03581, algorithm 1), with the absolute difference between
    scores as its loss, as in the authors' code. Clients take the plan's models in turn.
    """
    passes = Passes(epochs, public_epochs, private_epochs)
    return ClientWork(
        open=lambda job: ConsensusWorker(job, passes),
        layout=lambda job: _layout(job, samples, public_epochs),
        jobs=lambda job: job.architectures,
        own_model=_own_model,
        num_passes=lambda job, task, first: _num_passes(job, passes, task, first),
    )


def distance(scores_BK: Tensor, consensus_BK: Tensor) -> Tensor:
    """Return the mean absolute difference of scores for each sample."""
    return (scores_BK - consensus_BK).abs().flatten(1).mean(1)


def _layout(job: Job, num_samples: int, public_epochs: int) -> Layout:
    """Lay out a table of scores on public samples, which all architectures must agree on."""
    public = job.federation.public
    assert public is not None
    if public_epochs and public.y is None:
        raise PlanError(
            "public_epochs needs labels, and public data from elsewhere come without: leave public_epochs out, "
            'or set public to "held_out"'
        )
    shapes = [_output_shape(each) for each in job.architectures]
    for number, shape in enumerate(shapes):
        if shape != shapes[0]:
            raise PlanError(
                f"models[0] gives scores of shape {shapes[0]} a sample, but models[{number}] {shape}: "
                "a mean of scores needs models with equal outputs"
            )
    shape = (min(num_samples, len(public.x)), *shapes[0])
    size, dtype = math.prod(shape), job.architectures[0].spec.dtype
    return Layout(ParamSpec((Slot("scores", shape, 0, size),), size, dtype), torch.zeros(size, dtype=dtype))


def _output_shape(job: Job) -> tuple[int, ...]:
    """Return the shape of a model's scores for one sample."""
    x, _ = job.federation.first(2)
    with as_before(job.model), torch.no_grad():
        outputs = job.model.eval()(job.inputs(x))
    return tuple(outputs.shape[1:])


def _own_model(
    job: Job, makers: Sequence[Callable[[], nn.Module]], client: int, params_D: Tensor, memory: State
) -> nn.Module:
    number = client % len(makers)
    return load(makers[number](), job.architectures[number].spec, memory[PARAMS])


def _num_passes(job: Job, passes: Passes, task: Task, first: bool) -> int:
    if first and passes.private_epochs:
        own = max(1, round(task.work * passes.private_epochs * job.federation.num_samples(task.client)))
    else:
        own = job.local_passes(task)
    labelled = passes.public_epochs * job.num_public if first else 0
    digested = passes.epochs * job.spec.slots[0].shape[0] if task.version else 0
    return own + round(task.work * (labelled + digested))


def public_indices(job: Job, version: int) -> np.ndarray:
    """Return the public samples of a version's consensus: all, or as many as a round takes, drawn anew each time."""
    total, num = job.num_public, job.spec.slots[0].shape[0]
    if num == total:
        return np.arange(total)
    return np.sort(generator(job.seed, "public samples", version).choice(total, num, replace=False))


@final
class ConsensusWorker(Worker):
    """Trains and evaluates clients that differ in their models; one working model an architecture."""

    def __init__(self, job: Job, passes: Passes) -> None:
        self.job, self._passes = job, passes
        self._spaces: dict[int, Workspace] = {}

    def of(self, client: int) -> tuple[Job, Workspace]:
        """Return the job of a client's architecture, and its working model."""
        number = client % len(self.job.architectures)
        if number not in self._spaces:
            self._spaces[number] = workspace(self.job.architectures[number])
        return self.job.architectures[number], self._spaces[number]

    def train(self, task: Task, sent: Broadcast, memory: State, samples: Samples) -> Trained:
        """Digest the consensus, revisit the client's own data, and score the next public samples."""
        kind, space = self.of(task.client)
        first, passes = PARAMS not in memory, self._passes
        space.params_D.copy_(kind.first_D if first else memory[PARAMS])
        space.attributes.restore()
        if first and passes.public_epochs:
            labels = self._labels()
            self._learn("public labels", task, np.arange(len(labels)), labels, kind.loss, passes.public_epochs)
        if task.version and passes.epochs:
            scores = sent.params_D.view(self.job.spec.slots[0].shape)
            indices = public_indices(self.job, task.version)
            self._learn("digest", task, indices, scores, distance, passes.epochs)
        if first and passes.private_epochs:
            kind = replace(kind, local=replace(kind.local, epochs=passes.private_epochs, steps=None))
        done = train_client(kind, space, task, kind.broadcast(space.params_D.clone(), {}), {})
        params_E = space.params_D.clone()
        scores_D = self._score(kind, space, params_E, public_indices(self.job, task.version + 1))
        return Trained(
            Update(scores_D, torch.ones((), dtype=scores_D.dtype, device=kind.device), {}),
            {PARAMS: params_E},
            done.loss,
        )

    def evaluate(self, params_D: Tensor, memory: State, samples: Samples) -> Sums:
        """Measure the model that a client keeps."""
        return evaluate_samples(*self.of(samples.client), memory[PARAMS], {}, *samples.load())

    def _labels(self) -> Tensor:
        public = self.job.federation.public
        assert public is not None and public.y is not None
        return torch.from_numpy(public.y).to(self.job.device)

    def _learn(
        self,
        purpose: str,
        task: Task,
        indices: np.ndarray,
        targets: Tensor,
        loss_of: Callable[[Tensor, Tensor], Tensor],
        epochs: int,
    ) -> None:
        """Pass over public samples and their targets a few times, or for as long as there is time."""
        kind, space = self.of(task.client)
        rng = generator(kind.seed, purpose, task.attempt, task.client)
        size = min(kind.batch_size, len(indices))
        orders = [rng.permutation(len(indices)) for _ in range(epochs)]
        batches = [order[start : start + size] for order in orders for start in range(0, len(order), size)]
        base = derive(kind.seed, purpose, task.attempt, task.client) >> 2
        lr = kind.number(kind.lr_of(task.version))
        tensors: list[Tensor] = [leaf.data for leaf in space.leaves]
        memory = kind.optimizer.init(tensors)
        with seeded(base, kind.device):
            for number, batch_B in enumerate(batches[: max(1, round(task.work * len(batches)))]):
                set_seed(space.model, kind.dropout_seeds, base + number)
                x = _inputs(kind, indices[batch_B])
                loss = loss_of(space.model(x), targets[torch.from_numpy(batch_B).to(kind.device)]).mean()
                grads = torch.autograd.grad(loss, space.leaves, allow_unused=True, materialize_grads=True)
                count = kind.number(float(number + 1))
                with torch.no_grad():
                    kind.optimizer.step_(tensors, list(grads), memory, lr, count)

    def _score(self, kind: Job, space: Workspace, params_E: Tensor, indices: np.ndarray) -> Tensor:
        """A model's class scores on public samples, as one vector."""
        with evaluating(kind, space, params_E):
            slices = [indices[start : start + SLICE] for start in range(0, len(indices), SLICE)]
            scores = torch.cat([space.model(_inputs(kind, part)) for part in slices])
        return scores.clone().reshape(-1).to(self.job.spec.dtype)


def _inputs(kind: Job, indices: np.ndarray) -> Tensor:
    return kind.inputs(kind.federation.public_features(indices))
