"""The working model of one side: its layers, whose tensors are views of one vector, and its optimiser."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor, nn

from atoll.split.cut import Side, side_job
from atoll.train.dropout import set_seed
from atoll.train.job import Job
from atoll.train.loop import workspace


@final
class Half:
    """Layers in training; machines change it by whole steps only, after they have checked what they got."""

    def __init__(self, job: Job, side: Side) -> None:
        self.job = side_job(job, side)
        self._space = workspace(self.job)
        named = zip(self.job.spec.slots, self._space.leaves, strict=False)  # statistics follow parameters
        self.leaves = [leaf for slot, leaf in named if not (side.frozen and slot.name.startswith("head."))]
        """Its trained parameters, in the order of their vector."""
        self._memory: list[Tensor] | None = None
        self.num_steps = 0
        """Steps of the optimiser since it began anew."""

    @property
    def vector(self) -> Tensor:
        """The values of its layers, copied."""
        return self._space.params_D.clone()

    def stage(self, name: str) -> nn.Module:
        """Return one of its stages: `head`, `body` or `tail`."""
        stages = self._space.model
        assert isinstance(stages, nn.ModuleDict)
        return stages[name]

    def restore(self, values: Tensor) -> None:
        """Begin anew from a vector: no memory of the optimiser, first values of what does not travel."""
        self._space.restore(values, {})
        self.begin()

    def begin(self) -> None:
        """Let the optimiser begin anew, from the values that the layers have."""
        self._memory, self.num_steps = None, 0

    def seed_dropout(self, seed: int) -> None:
        """Give the dropout layers the seed of a client's batch."""
        if self.job.dropout_seeds:
            set_seed(self._space.model, self.job.dropout_seeds, seed)

    def step(self, grads: Sequence[Tensor], lr: Tensor) -> None:
        """Take a step of the plan's optimiser."""
        targets = [leaf.data for leaf in self.leaves]
        if not targets:
            return
        if self._memory is None:
            self._memory = self.job.optimizer.init(targets)
        self.num_steps += 1
        number = torch.tensor(float(self.num_steps), dtype=self.job.spec.dtype)
        with torch.no_grad():
            self.job.optimizer.step_(targets, list(grads), self._memory, lr, number)
