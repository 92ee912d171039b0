"""Rounds of split learning in a simulation: an engine that lets the machines of a cohort exchange encoded messages.

What the round makes of it (weighted mean, server step, evaluation, rows) is the ordinary commit: the engine gives one
update for each client. Where layers are shared or handed on, the updates of all clients say the same of them, so that
their mean is what the round ended with.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import final

from torch import Tensor

from atoll.core.messages import Broadcast, State, Task, Update
from atoll.core.plan import Plan
from atoll.core.seeds import generator
from atoll.engine.base import InProcess, Progress, silent
from atoll.split.clock import Moment
from atoll.split.exchange import Exchange
from atoll.split.half import Half
from atoll.split.outcome import joined, traffic_of, updates_of
from atoll.split.parties import Parties
from atoll.split.rehearsal import rehearse_cut
from atoll.split.vertical import VerticalEngine
from atoll.train.exchange import Told, Work, received
from atoll.train.job import Job
from atoll.train.trainer import Trainer


def split_engine(plan: Plan, job: Job) -> SplitEngine | VerticalEngine:
    """Rehearse a plan whose model is cut, and return the engine that simulates it."""
    parties = rehearse_cut(plan, job)
    return SplitEngine(parties) if isinstance(parties, Parties) else VerticalEngine(parties)


@final
class SplitEngine(InProcess):
    """Trains cohorts by split learning, in this process."""

    counts_traffic = True

    def __init__(self, parties: Parties) -> None:
        job = parties.job
        super().__init__(job, Trainer(job))
        self.parties = parties
        self._server = Half(job, parties.cut.server)
        self._clients: list[Half] = []
        self._delivered: Mapping[Task, tuple[Update, Told]] = {}
        """What the cohort that was trained last sends."""

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
        """Train a cohort; its updates are folded as those of the ordinary loop are."""
        way, start_M = self.parties.way, self.job.model_of(sent[tasks[0].version])
        if way.hands_on or way.own_server:
            exchanges, ends = self._one_by_one(tasks, start_M, progress)
        else:
            exchanges, ends = self._together(tasks, start_M, progress)
        self._delivered = dict(zip(tasks, updates_of(self.job, start_M, exchanges, ends), strict=True))
        return super().train(tasks, sent, states)._replace(traffic=traffic_of(self.parties, exchanges))

    def works(
        self, groups: list[list[Task]], sent: Mapping[int, Broadcast], states: Mapping[int, State]
    ) -> Iterable[Work]:
        """Fold updates one at a time, in the order of the ordinary loop, so that sums have the same bits."""
        for [task] in groups:
            update, told = self._delivered[task]
            yield received(self.job, self.trainer.fold, [task], update.alone(), [told])

    def _one_by_one(
        self, tasks: Sequence[Task], start_M: Tensor, progress: Progress
    ) -> tuple[list[Exchange], list[Tensor]]:
        """Train clients in turn, or each with layers of the server's of its own; return the models that they end with.

        A client whose session fails hands on what it began with.
        """
        cut, way, server = self.parties.cut, self.parties.way, self._server
        [client] = self._halves(1)
        exchanges, ends = list[Exchange](), list[Tensor]()
        model_M, now = start_M, Moment()
        for task in tasks:
            server.restore(cut.server.take(model_M))
            exchange = Exchange(self.parties, task, client, server, now)
            exchange.start(cut.client.take(model_M))
            while not exchange.is_done:
                exchange.advance(Moment())
            end_M = self._joined(model_M, exchange.weights)
            if way.hands_on:
                now = exchange.now
                model_M = model_M if exchange.failed else end_M
            exchanges.append(exchange)
            ends.append(end_M)
            progress(len(exchanges))
        return exchanges, [model_M] * len(ends) if way.hands_on else ends

    def _together(
        self, tasks: Sequence[Task], start_M: Tensor, progress: Progress
    ) -> tuple[list[Exchange], list[Tensor]]:
        """Train clients at once on one set of the server's layers; return the models that they end with."""
        cut, server = self.parties.cut, self._server
        server.restore(cut.server.take(start_M))
        halves = self._halves(len(tasks))
        exchanges = [
            Exchange(self.parties, task, half, server, Moment()) for task, half in zip(tasks, halves, strict=True)
        ]
        for exchange in exchanges:
            exchange.start(cut.client.take(start_M))
        step, free = 0, Moment()
        while not all(exchange.is_done for exchange in exchanges):
            order = generator(self.job.seed, "split order", tasks[0].attempt, step).permutation(len(tasks))
            for place in order.tolist():
                if not exchanges[place].is_done:
                    free = exchanges[place].advance(free)
            step += 1
            progress(sum(exchange.is_done for exchange in exchanges))
        return exchanges, [self._joined(start_M, exchange.weights) for exchange in exchanges]

    def _halves(self, num: int) -> list[Half]:
        """Return working models of the clients' layers, of which there are as many as train at once."""
        while len(self._clients) < num:
            self._clients.append(Half(self.job, self.parties.cut.client))
        return self._clients[:num]

    def _joined(self, like_M: Tensor, weights: Tensor | None) -> Tensor:
        """Return a whole model of both sides' layers."""
        return joined(self.parties.cut, like_M, weights, self._server.vector)
