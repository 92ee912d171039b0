"""What a round of split learning comes to: an update for each client, and what was sent, for every driver."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from atoll.core.messages import Task, Update
from atoll.split.clock import Moment
from atoll.split.cut import Cut
from atoll.split.parties import Parties
from atoll.train.exchange import Told, Traffic
from atoll.train.job import Job, with_statistics


class Exchanged(Protocol):
    """One client's session, after it or while it lasts."""

    task: Task
    now: Moment
    """When its last message arrived."""
    failed: str
    """Why it has failed; "" if it has not."""
    bytes: Counter[tuple[str, bool]]
    """(direction, whether it crosses the cut) -> bytes of messages."""
    messages: int
    weights: Tensor | None
    """The client's layers at the end."""

    @property
    def loss(self) -> float:
        """Mean loss of the batches so far; NaN if there was none."""


def joined(cut: Cut, like_M: Tensor, weights: Tensor | None, server: Tensor) -> Tensor:
    """Return a whole model of both sides' layers; of a client that failed, NaN, so that it does not count."""
    model_M = torch.full_like(like_M, torch.nan)
    if weights is not None:
        cut.client.put(model_M, weights)
        cut.server.put(model_M, server)
    return model_M


def updates_of(
    job: Job, start_M: Tensor, exchanges: Sequence[Exchanged], ends: Sequence[Tensor]
) -> Iterable[tuple[Update, Told]]:
    """Return what each client's update would be; one that failed is not finite, and does not count."""
    for exchange, end_M in zip(exchanges, ends, strict=True):
        num_samples = job.federation.num_samples(exchange.task.client)
        delta_M = end_M - start_M if not exchange.failed else torch.full_like(start_M, torch.nan)
        weight = torch.tensor(float(num_samples), dtype=job.spec.dtype)
        bytes_up = sum(num for (way, _), num in exchange.bytes.items() if way == "up")
        update = with_statistics(job, Update(job.trainable(delta_M), weight, {}), delta_M)
        yield update, Told(num_samples, exchange.loss, bytes_up)


def traffic_of(parties: Parties, exchanges: Sequence[Exchanged]) -> Traffic:
    """Add up what a cohort sent; those who train at once do so in parallel."""
    total, end = Counter[tuple[str, bool]](), Moment()
    for exchange in exchanges:
        total += exchange.bytes
        end = end.later(exchange.now)
    return Traffic(
        bytes_down=sum(num for (way, _), num in total.items() if way == "down"),
        seconds=end.seconds if parties.split.takes_time else None,
        counts={
            "messages": sum(exchange.messages for exchange in exchanges),
            "round_trips": math.ceil(end.trips),
            "cut_bytes": sum(num for (_, crosses), num in total.items() if crosses),
        },
    )
