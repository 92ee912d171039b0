"""What a round of split learning comes to: an update for each client, and what was sent, for every driver."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from atoll.core.aggregator import Aggregator
from atoll.core.messages import Task, Update
from atoll.split.clock import Moment
from atoll.split.columns import VerticalParties
from atoll.split.cut import Cut
from atoll.split.joint import JointServer
from atoll.split.parties import Parties
from atoll.train.exchange import Told, Traffic, Work, received
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


def joint_works(
    parties: VerticalParties, fold: Aggregator, tasks: Sequence[Task], start_M: Tensor, ended: JointServer
) -> dict[Task, Work]:
    """Return what came of each task: the one update, from the party with the labels, and a report of each other party.

    So the mean is that update to the bit. A round that lacks the layers of a party counts for none.
    """
    job, weights = parties.job, dict(ended.state.weights)
    delta_M = torch.full_like(start_M, torch.nan)
    if len(weights) == len(parties.holders):
        delta_M = parties.assembled(start_M, weights, ended.half.vector) - start_M
    num_samples = job.federation.num_samples(parties.labels)
    up = {
        number: sum(num for (who, way, _), num in ended.bytes.items() if (who, way) == (number, "up"))
        for number in range(len(parties.holders))
    }
    weight = torch.tensor(float(num_samples), dtype=job.spec.dtype)
    update = with_statistics(job, Update(job.trainable(delta_M), weight, {}), delta_M)
    [owner] = [task for task in tasks if task.client == parties.labels]
    told = Told(num_samples, ended.loss, up[parties.labels])
    works = {owner: received(job, fold, [owner], update.alone(), [told])}
    [report] = works[owner].reports
    for task in tasks:
        if task != owner:
            side = parties.holders[task.client].cut.client
            own = report._replace(client=task.client, norm=float(side.take(delta_M).norm()), bytes_up=up[task.client])
            works[task] = Work(fold.zero(), [own], {})
    return works


def joint_traffic(parties: VerticalParties, ended: JointServer) -> Traffic:
    """Add up what all parties sent and got."""
    total = Counter[tuple[str, bool]]()
    for (_, way, crosses), num in ended.bytes.items():
        total[way, crosses] += num
    return _traffic(total, ended.messages, ended.now, takes_time=parties.split.takes_time)


def traffic_of(parties: Parties, exchanges: Sequence[Exchanged]) -> Traffic:
    """Add up what a cohort sent; those who train at once do so in parallel."""
    total, end = Counter[tuple[str, bool]](), Moment()
    for exchange in exchanges:
        total += exchange.bytes
        end = end.later(exchange.now)
    num = sum(exchange.messages for exchange in exchanges)
    return _traffic(total, num, end, takes_time=parties.split.takes_time)


def _traffic(total: Counter[tuple[str, bool]], num_messages: int, end: Moment, *, takes_time: bool) -> Traffic:
    return Traffic(
        bytes_down=sum(num for (way, _), num in total.items() if way == "down"),
        seconds=end.seconds if takes_time else None,
        counts={
            "messages": num_messages,
            "round_trips": math.ceil(end.trips),
            "cut_bytes": sum(num for (_, crosses), num in total.items() if crosses),
        },
    )
