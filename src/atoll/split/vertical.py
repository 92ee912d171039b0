"""Rounds of vertical learning in a simulation: an engine that lets all parties and the server exchange messages.

What the round makes of it is the ordinary commit of what `outcome` says of each party's task.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import final

import torch

from atoll.core.errors import PlanError, TrainingError
from atoll.core.messages import STATISTICS, Broadcast, State, Task
from atoll.core.plan import Plan
from atoll.core.transform import chain
from atoll.engine.base import InProcess, Progress, silent
from atoll.split.columns import Holder, VerticalParties, build_vertical
from atoll.split.cut import is_close
from atoll.split.half import Half
from atoll.split.joint import JointExchange
from atoll.split.outcome import joint_traffic, joint_works
from atoll.split.shield import OPEN
from atoll.train.exchange import Work
from atoll.train.job import Job, broadcast_of, first_server
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
        exchange.run(start_M)
        if exchange.failed:
            raise TrainingError(
                f"round {tasks[0].version + 1} ends, since every step needs all parties; {exchange.failed}"
            )
        self._done = joint_works(parties, self.trainer.fold, tasks, start_M, exchange.server)
        return super().train(tasks, sent, states, progress)._replace(traffic=joint_traffic(parties, exchange.server))

    def works(
        self, groups: list[list[Task]], sent: Mapping[int, Broadcast], states: Mapping[int, State]
    ) -> Iterable[Work]:
        """Return what came of each party's task."""
        for [task] in groups:
            yield self._done[task]


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
    halves = [Half(one_step, holder.cut.client) for holder in exact]
    exchange = JointExchange(trial, tasks, halves, server)
    exchange.run(job.first_D)
    if exchange.failed:
        return parties  # a first step that diverges is for training to report
    moved_M = parties.assembled(job.first_D, dict(exchange.server.state.weights), server.vector) - job.first_D
    whole_M = torch.cat([whole.delta_D, *([whole.aux[STATISTICS]] if STATISTICS in whole.aux else [])])
    moved_M = moved_M[: len(whole_M)]
    if not is_close(whole_M, moved_M):
        raise PlanError(
            f"split: a step of the parties moves the model by up to {float((whole_M - moved_M).abs().max()):.3g} "
            "otherwise than a step of the whole model: use a loss and an optimiser that see each sample and each "
            "parameter by itself, models without random numbers of their own, or set split.micro_batches = 1"
        )
    return parties
