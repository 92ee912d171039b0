"""Clients that keep models of their own and send class scores on public samples instead of parameters.

Shapes: D scores, E parameters of one client's model, B samples a batch. The parameters are the client's state.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from atoll.core.messages import Broadcast, State, Task, Update
from atoll.core.seeds import derive, generator
from atoll.train.dropout import set_seed
from atoll.train.evaluate import SLICE, evaluate_clients, evaluate_slice, evaluating
from atoll.train.job import Job
from atoll.train.loop import Trained, Workspace, train_client, workspace
from atoll.train.seeded import seeded

PARAMS = "params"
"""Under this name a client remembers its model."""


def public_indices(job: Job, version: int) -> np.ndarray:
    """The public samples whose consensus is this version: all, or as many as a round takes, drawn anew each time."""
    total, num = job.num_public, job.spec.slots[0].shape[0]
    if num == total:
        return np.arange(total)
    return np.sort(generator(job.seed, "public samples", version).choice(total, num, replace=False))


class OwnModels:
    """Trains and evaluates clients that differ in their models; one working model an architecture."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self._spaces: dict[int, Workspace] = {}

    def of(self, client: int) -> tuple[Job, Workspace]:
        """The job of a client's architecture, and its working model."""
        number = client % len(self.job.kinds)
        if number not in self._spaces:
            self._spaces[number] = workspace(self.job.kinds[number])
        return self.job.kinds[number], self._spaces[number]

    def train(self, task: Task, sent: Broadcast, state: State) -> Trained:
        """Digest the consensus, revisit the client's own data, and score the next public samples."""
        kind, space = self.of(task.client)
        first, plan = PARAMS not in state, self.job.algorithm.scores
        assert plan is not None
        space.params_D.copy_(kind.first_D if first else state[PARAMS])
        space.attributes.restore()
        if first and plan.public_epochs:
            labels = self._labels()
            self._learn("public labels", task, np.arange(len(labels)), labels, kind.loss, plan.public_epochs)
        if task.version and plan.epochs:
            consensus = sent.params_D.view(self.job.spec.slots[0].shape)
            indices = public_indices(self.job, task.version)
            self._learn("digest", task, indices, consensus, plan.loss, plan.epochs)
        if first and plan.private_epochs:
            kind = replace(kind, local=replace(kind.local, epochs=plan.private_epochs, steps=None))
        done = train_client(kind, space, task, kind.broadcast(space.params_D.clone(), {}), {})
        params_E = space.params_D.clone()
        scores_D = self._score(kind, space, params_E, public_indices(self.job, task.version + 1))
        return Trained(Update(scores_D, torch.ones((), dtype=scores_D.dtype), {}), {PARAMS: params_E}, done.loss)

    def test(self, client: int, state: State) -> State:
        """Confusion matrix and summed loss of a client's model on the whole test set."""
        kind, space = self.of(client)
        starts = range(0, self.job.federation.dataset.num_test, SLICE)
        parts = [evaluate_slice(kind, space, state[PARAMS], start) for start in starts]
        return {name: torch.stack([part[name] for part in parts]).sum(0) for name in parts[0]}

    def score_at_home(self, client: int, state: State) -> Tensor:
        """(1, 2): accuracy and mean loss of a client's model on the client's own evaluation samples."""
        return evaluate_clients(*self.of(client), state[PARAMS], [client])

    def _labels(self) -> Tensor:
        public = self.job.federation.public
        assert public is not None and public.y is not None
        return torch.from_numpy(public.y)

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
        lr = torch.tensor(kind.lr_of(task.version), dtype=kind.spec.dtype)
        tensors: list[Tensor] = [leaf.data for leaf in space.leaves]
        memory = kind.optimizer.init(tensors)
        with seeded(base):
            for number, batch_B in enumerate(batches[: max(1, round(task.work * len(batches)))]):
                set_seed(space.model, kind.dropout_seeds, base + number)
                x = _inputs(kind, indices[batch_B])
                loss = loss_of(space.model(x), targets[torch.from_numpy(batch_B)]).mean()
                grads = torch.autograd.grad(loss, space.leaves, allow_unused=True, materialize_grads=True)
                count = torch.tensor(float(number + 1), dtype=kind.spec.dtype)
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
