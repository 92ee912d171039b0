"""Rounds of vertical learning in a simulation: an engine that lets all parties and the server exchange messages.

What the round makes of it is the ordinary commit: the party that holds the labels gives the one update, of all sides,
and the others say that they took part. So the mean is that update to the bit.
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import final

import torch
from torch import Tensor

from atoll.core.errors import PlanError, TrainingError
from atoll.core.messages import STATISTICS, Broadcast, State, Task, Update
from atoll.core.plan import Plan
from atoll.core.transform import chain
from atoll.engine.base import InProcess, Progress, silent
from atoll.split.columns import Holder, VerticalParties, build_vertical
from atoll.split.cut import is_close
from atoll.split.half import Half
from atoll.split.joint import JointExchange
from atoll.split.shield import OPEN
from atoll.train.exchange import Told, Traffic, Work, received
from atoll.train.job import Job, broadcast_of, first_server, with_statistics
from atoll.train.trainer import Trainer


@final
class VerticalEngine(InProcess):
    """Trains parties that hold different columns together, in this process."""

    counts_traffic = True

    def __init__(self, parties: VerticalParties) -> None:
        super().__init__(parties.job, Trainer(parties.job))
        self.parties = parties
        self._server = Half(parties.job, parties.server)
        self._halves = [Half(parties.job, holder.cut.client) for holder in parties.holders]
        self._done: Mapping[Task, Work] = {}
        """What the round that was trained last made of each party's task."""

    def describe(self) -> dict[str, object]:
        """Name and settings."""
        return {"name": "inline"}

    def train(
        self,
        tasks: Sequence[Task],
        sent: Mapping[int, Broadcast],
        states: Mapping[int, State],
        progress: Progress = silent,
    ) -> Work:
        """Train all parties for a round; the update is folded as that of the ordinary loop is."""
        parties, start_M = self.parties, self.job.model_of(sent[tasks[0].version])
        if {task.client for task in tasks} != set(range(len(parties.holders))):
            raise TrainingError(
                f"a round of vertical learning needs all {len(parties.holders)} parties, got the tasks of "
                f"{sorted(task.client for task in tasks)}: set policy.size to the number of parties"
            )
        exchange = JointExchange(parties, tasks, self._halves, self._server)
        self._server.restore(parties.server.take(start_M))
        exchange.run({number: holder.cut.client.take(start_M) for number, holder in enumerate(parties.holders)})
        if exchange.failed:
            raise TrainingError(
                f"round {tasks[0].version + 1} ends, since every step needs all parties; {exchange.failed}"
            )
        self._done = dict(self._works(tasks, start_M, exchange))
        return super().train(tasks, sent, states, progress)._replace(traffic=_traffic(parties, exchange))

    def works(
        self, groups: list[list[Task]], sent: Mapping[int, Broadcast], states: Mapping[int, State]
    ) -> Iterable[Work]:
        """Return what came of each party's task."""
        for [task] in groups:
            yield self._done[task]

    def _works(self, tasks: Sequence[Task], start_M: Tensor, exchange: JointExchange) -> Iterable[tuple[Task, Work]]:
        """Yield the update of the party that holds the labels, and a report of each other one."""
        job, parties = self.job, self.parties
        delta_M = parties.assembled(start_M, exchange.weights, self._server.vector) - start_M
        num_samples = job.federation.num_samples(parties.labels)
        up = {
            number: sum(n for (who, way, _), n in exchange.bytes.items() if (who, way) == (number, "up"))
            for number in range(len(parties.holders))
        }
        weight = torch.tensor(float(num_samples), dtype=job.spec.dtype)
        update = with_statistics(job, Update(job.trainable(delta_M), weight, {}), delta_M)
        [owner] = [task for task in tasks if task.client == parties.labels]
        told = Told(num_samples, exchange.loss, up[parties.labels])
        counted = received(job, self.trainer.fold, [owner], update.alone(), [told])
        yield owner, counted
        [report] = counted.reports
        for task in tasks:
            if task != owner:
                side = parties.holders[task.client].cut.client
                own = report._replace(
                    client=task.client, norm=float(side.take(delta_M).norm()), bytes_up=up[task.client]
                )
                yield task, Work(self.trainer.fold.zero(), [own], {})


def _traffic(parties: VerticalParties, exchange: JointExchange) -> Traffic:
    """Add up what all parties sent and got."""
    total, end = Counter[tuple[str, bool]](), exchange.now
    for (_, way, crosses), num in exchange.bytes.items():
        total[way, crosses] += num
    return Traffic(
        bytes_down=sum(num for (way, _), num in total.items() if way == "down"),
        seconds=end.seconds if parties.split.takes_time else None,
        counts={
            "messages": exchange.messages,
            "round_trips": math.ceil(end.trips),
            "cut_bytes": sum(num for (_, crosses), num in total.items() if crosses),
        },
    )


def _undefended(holder: Holder) -> Holder:
    """Return a party that sends exact values, and trains all of its layers."""
    client = holder.cut.client._replace(frozen=False)
    return holder._replace(cut=holder.cut._replace(client=client), codec=holder.codec._replace(chain=chain()))


def rehearse_vertical(plan: Plan, job: Job) -> VerticalParties:
    """Cut a plan's model between parties, and refuse it if a step of theirs differs from one of the whole model."""
    parties = build_vertical(plan, job)
    local = replace(job.local, epochs=None, steps=1)
    one_step = replace(job, model=copy.deepcopy(job.model), local=local)
    sent = broadcast_of(job, job.first_D, first_server(job, job.first_D))
    whole = Trainer(one_step).train_one(Task(parties.labels, 0, 0), sent, {}).update
    exact = [_undefended(holder) for holder in parties.holders]
    trial = parties._replace(job=one_step, holders=tuple(exact), shield=OPEN)
    tasks = [Task(number, 0, 0) for number in range(len(exact))]
    server = Half(one_step, parties.server)
    server.restore(parties.server.take(job.first_D))
    halves = [Half(one_step, holder.cut.client) for holder in exact]
    exchange = JointExchange(trial, tasks, halves, server)
    exchange.run({number: holder.cut.client.take(job.first_D) for number, holder in enumerate(exact)})
    if exchange.failed:
        return parties  # a first step that diverges is for training to report
    moved_M = parties.assembled(job.first_D, exchange.weights, server.vector) - job.first_D
    whole_M = torch.cat([whole.delta_D, *([whole.aux[STATISTICS]] if STATISTICS in whole.aux else [])])
    moved_M = moved_M[: len(whole_M)]
    if not is_close(whole_M, moved_M):
        raise PlanError(
            f"split: a step of the parties moves the model by up to {float((whole_M - moved_M).abs().max()):.3g} "
            "otherwise than a step of the whole model: use a loss and an optimiser that see each sample and each "
            "parameter by itself, models without random numbers of their own, or set split.micro_batches = 1"
        )
    return parties
