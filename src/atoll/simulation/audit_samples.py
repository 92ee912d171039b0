"""Audit of private local steps, with samples of one client as canaries.

The client is the plan's most exposed one, with its number of samples. Most of them are canaries: the gradient of each
has one non-zero entry, a thousand clips long, that no other sample shares. Batches, clip, grid and noise are those of
the plan's private steps (`train/private.py`); a trial is one step, with a fresh secret.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from atoll.core.messages import Broadcast, Task
from atoll.core.plan import Plan
from atoll.core.privacy import Exposure
from atoll.data.dataset import Dataset
from atoll.data.index import dealt
from atoll.privacy.auditing import Counts, count_detections
from atoll.privacy.noise import fresh_secret
from atoll.train.build import build_job
from atoll.train.federation import Federation
from atoll.train.job import Job
from atoll.train.private import poisson_batches
from atoll.train.trainer import Trainer

LOUD = 1000.0
"""Length of a canary, in clips."""
MOST = 20_000
"""Maximum number of canaries; the gradients of the other samples are zero."""
SPARE = 1000
"""Number of entries without a canary."""


class Trial(NamedTuple):
    """Result of one audited round or step."""

    counts: Counts
    drawn: int
    """Number of clients or samples that were drawn."""
    drawable: int
    """Number of clients or samples that could have been drawn."""

    def plus(self, other: Trial) -> Trial:
        """Return the sums of both results."""
        return Trial(
            counts=self.counts + other.counts,
            drawn=self.drawn + other.drawn,
            drawable=self.drawable + other.drawable,
        )


class Canaries(nn.Module):
    """A model in which sample i has a gradient of length `scale` in entry i alone, and zero from sample `num` on."""

    def __init__(self, num: int, scale: float) -> None:
        super().__init__()
        self.entries, self.num, self.scale = nn.Embedding(num + SPARE, 1), num, scale

    def forward(self, x: Tensor) -> Tensor:
        """Return the loss of each sample."""
        losses: Tensor = self.entries(x).flatten(1) * (self.scale * (x < self.num))
        return losses


def canaries(num: int, scale: float) -> nn.Module:
    """Build the model of an audit; a plan names this function."""
    return Canaries(num, scale)


def own_loss(outputs: Tensor, y: Tensor) -> Tensor:
    """Return the model's output, which is the loss itself."""
    return outputs[:, 0]


def sample_trials(plan: Plan, job: Job, exposure: Exposure) -> Iterator[Trial]:
    """Run private steps of the most exposed client, whose samples are canaries, and yield the result of each."""
    assert job.mechanism is not None and job.mechanism.steps is not None
    client = exposure.groups[0].client if exposure.groups else 0
    num = job.federation.num_samples(client)
    size, clip, num_canaries = min(job.batch_size, num), job.mechanism.steps.clip, min(num, MOST)
    canary_job = _canary_job(plan, job, num, size, LOUD * clip)
    broadcast = Broadcast(canary_job.first_D, {})
    while True:
        canary_job = replace(canary_job, secret=fresh_secret())
        task = Task(0, 0, 0)
        update = Trainer(canary_job).train_one(task, broadcast, {}).update
        [drawn] = poisson_batches(canary_job, task)
        counts = count_detections(-update.delta_D * (size / clip), drawn[drawn < num_canaries])
        yield Trial(counts=counts, drawn=len(drawn), drawable=num)


def _canary_job(plan: Plan, job: Job, num: int, size: int, scale: float) -> Job:
    """Build a job of the plan's mechanism on one client with `num` samples: batches of `size`, one step a task."""
    num_canaries = min(num, MOST)
    x = np.minimum(np.arange(num), num_canaries)[:, None]
    y = np.zeros(num, dtype=np.int64)
    dataset = Dataset(name="canaries", train_x=x, train_y=y, test_x=x, test_y=y, num_classes=2, tokens=True)
    federation = Federation(dataset, dealt(np.arange(num), np.array([0, num])))
    canary_plan = Plan(
        rounds=1,
        model={"name": f"{__name__}:canaries", "num": num_canaries, "scale": scale},
        loss=f"{__name__}:own_loss",
        local={"steps": 1, "batch_size": size, "lr": 1.0},
        privacy=plan.privacy,
    )
    canary_job = build_job(canary_plan, federation)
    return replace(canary_job, mechanism=job.mechanism, first_D=torch.zeros_like(canary_job.first_D))
