"""Canaries among the samples of a client: an audit of private local steps.

The client is the one of the plan that is exposed most, with as many samples as it has. Most of them are canaries: the
gradient of each is a Dirac, a thousand clips long, in an entry of its own. Batches, clip, grid and noise are those of
the plan's private steps (`train/private.py`); a try is one step, with fresh secrets.
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
from atoll.privacy.auditing import Counts, count_seen
from atoll.privacy.noise import fresh_secret
from atoll.train.federation import Federation
from atoll.train.job import Job, build_job
from atoll.train.private import poisson_batches
from atoll.train.trainer import Trainer

LOUD = 1000.0
"""How many clips long a canary is."""
MOST = 20_000
"""So many samples of the client are canaries, at most; the others count for nothing."""
SPARE = 1000
"""Entries that no canary has."""


class Try(NamedTuple):
    """What one round, or step, has shown."""

    counts: Counts
    drawn: int
    """How many were drawn, of how many that could have been."""
    drawable: int

    def with_more(self, other: Try) -> Try:
        """Both together."""
        return Try(
            counts=self.counts + other.counts,
            drawn=self.drawn + other.drawn,
            drawable=self.drawable + other.drawable,
        )


class Canaries(nn.Module):
    """A model in which the gradient of sample i is a Dirac of length `scale` in entry i, and none from `num` on."""

    def __init__(self, num: int, scale: float) -> None:
        super().__init__()
        self.entries, self.num, self.scale = nn.Embedding(num + SPARE, 1), num, scale

    def forward(self, x: Tensor) -> Tensor:
        """One number a sample, which is its loss."""
        found: Tensor = self.entries(x).flatten(1) * (self.scale * (x < self.num))
        return found


def canaries(num: int, scale: float) -> nn.Module:
    """The model of an audit, for plans."""
    return Canaries(num, scale)


def own_loss(outputs: Tensor, y: Tensor) -> Tensor:
    """The model's output is the loss."""
    return outputs[:, 0]


def sample_tries(plan: Plan, job: Job, exposure: Exposure) -> Iterator[Try]:
    """Private steps of the client that is exposed most, whose samples are canaries, one after another."""
    assert job.mechanism is not None and job.mechanism.steps is not None
    client = exposure.groups[0].client if exposure.groups else 0
    num = job.federation.num_samples(client)
    size, clip, shown = min(job.batch_size, num), job.mechanism.steps.clip, min(num, MOST)
    own = _canary_job(plan, job, num, size, LOUD * clip)
    sent = {0: Broadcast(own.first_D, {})}
    while True:
        own = replace(own, secret=fresh_secret())
        task = Task(0, 0, 0)
        update = Trainer(own).train_one(task, sent[0], {}).update
        [drawn] = poisson_batches(own, task)
        counts = count_seen(-update.delta_D * (size / clip), drawn[drawn < shown])
        yield Try(counts=counts, drawn=len(drawn), drawable=num)


def _canary_job(plan: Plan, job: Job, num: int, size: int, scale: float) -> Job:
    """The plan's mechanism on a client of so many samples, with batches of this size, one step a task."""
    shown = min(num, MOST)
    x = np.minimum(np.arange(num), shown)[:, None]
    y = np.zeros(num, dtype=np.int64)
    dataset = Dataset(name="canaries", train_x=x, train_y=y, test_x=x, test_y=y, num_classes=2, tokens=True)
    federation = Federation(dataset, dealt(np.arange(num), np.array([0, num])))
    canary_plan = Plan(
        rounds=1,
        model={"name": f"{__name__}:canaries", "num": shown, "scale": scale},
        loss=f"{__name__}:own_loss",
        local={"steps": 1, "batch_size": size, "lr": 1.0},
        privacy=plan.privacy,
    )
    own = build_job(canary_plan, federation)
    return replace(own, mechanism=job.mechanism, first_D=torch.zeros_like(own.first_D))
