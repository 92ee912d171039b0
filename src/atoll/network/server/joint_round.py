"""A round of vertical learning on a server: one machine, fed by the streams of all parties, in a thread of the run.

As in other ways nothing of a session is written down, and a server that was killed begins the round anew. A round needs
every party: if one leaves, stops or sends what is not due, no task of the round counts, and the run asks all again. If
they do not have the same rows, or a value is not finite, asking again would not help, and the run ends.
Shapes: M values of a model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import final

from torch import Tensor

from atoll.core.aggregator import Aggregator
from atoll.core.errors import TrainingError
from atoll.core.messages import Task
from atoll.network.server.held import HeldRound, RoundContext, Sessions
from atoll.network.server.streams import Stream, Taken
from atoll.split.clock import Moment
from atoll.split.columns import VerticalParties
from atoll.split.half import Half
from atoll.split.joint import JointServer, Sent, owners_task
from atoll.split.messages import NotFinite, RowsDiffer, SplitError
from atoll.split.outcome import joint_traffic, joint_works
from atoll.train.exchange import Work
from atoll.train.trainer import explained


@final
class PartySession:
    """One party's session: its stream, and when the messages that it answers arrived."""

    def __init__(self, task: Task, stream: Stream, stated_loss: float | None, until: float) -> None:
        self.task, self.stream, self.stated_loss, self.until = task, stream, stated_loss, until
        self.failed, self.offends, self.has_ended = "", False, False
        self.ends_run = False
        """Whether it failed for a reason that would be there again in another attempt."""
        self.heard: list[Moment] = []
        """When each message down arrived."""


@final
class JointRound:
    """Holds the sessions of all parties as one."""

    def __init__(self, parties: VerticalParties, tasks: Sequence[Task], start_M: Tensor, context: RoundContext) -> None:
        self._parties, self._tasks, self._start_M = parties, tasks, start_M
        self._sessions = Sessions(context)
        owner = next(owners_task(parties, task) for task in tasks)
        half, num_steps = Half(parties.job, parties.server), parties.job.num_steps(parties.labels, owner.work)
        self._server = JointServer(parties, owner, half, num_steps)
        self._parts: dict[int, PartySession] = {}

    def hold(self) -> HeldRound:
        """Hold the sessions; Refused if the run does not want them any more, TrainingError if it cannot go on."""
        try:
            self._open()
            self._exchange()
        finally:
            self._sessions.close_all()
        start_M, server = self._start_M, self._server

        def work_of(task: Task, fold: Aggregator) -> Work:
            return joint_works(self._parties, fold, self._tasks, start_M, server)[task]

        parts = self._parts.values()
        return HeldRound(
            work_of=work_of,
            traffic=joint_traffic(self._parties, server),
            reports=self._sessions.reports,
            signed=self._sessions.signed,
            failed={part.task: part.failed for part in parts if part.failed},
            offenders=tuple(part.task.client for part in parts if part.offends),
        )

    def _open(self) -> None:
        """Open the sessions of all parties: the coordinator commits no round that lacks one."""
        parties, sessions = self._parties, self._sessions
        for task in sorted(self._tasks, key=lambda task: task.client):
            stated = math.nan if parties.states_loss(task.client) else None
            stream = sessions.open(parties.of(task.client), task)
            self._parts[task.client] = PartySession(task, stream, stated, sessions.time_over())

    def _exchange(self) -> None:
        """Give each party its layers, exchange all batches, and take what the parties signed."""
        parts, sessions = list(self._parts.values()), self._sessions
        self._deliver(self._server.start(self._start_M))
        while not all(sessions.is_over(part) for part in parts):
            sessions.wait([part for part in parts if not sessions.is_over(part)])
            for part in parts:
                while not part.failed and (taken := part.stream.take()) is not None:
                    self._take(part, taken)
                    part.until = sessions.time_over()
            self._excuse()
            for part in parts:
                if not sessions.is_over(part):
                    sessions.look(part)
                    part.ends_run = part.stream.end is not None and part.stream.end.not_finite
            broken = next((part for part in parts if part.failed), None)
            if broken is not None:
                name = self._parties.holders[broken.task.client].name
                why = f"since every step needs all parties; the session of {name}: {broken.failed}"
                self._fail(f"the round ended, {why}")
                if broken.ends_run:
                    raise TrainingError(f"round {broken.task.version + 1} ends, {why}")
        for part in parts:
            sessions.end(part)
        self._server.told_loss = next((p.stated_loss for p in parts if p.stated_loss is not None), None)

    def _take(self, part: PartySession, taken: Taken) -> None:
        """Process a message of a party; one that is not due, or not finite, breaks the session."""
        number, server = part.task.client, self._server
        try:
            with explained():
                message = server.read(number, taken.data)
                ready = part.heard[min(taken.cause, len(part.heard) - 1)]
                self._deliver(server.take(message, server.arrival(message, len(taken.data), ready)))
        except (NotFinite, RowsDiffer) as error:
            part.failed, part.ends_run = str(error), True
        except SplitError as error:
            part.failed, part.offends = str(error), True
        part.has_ended = number in server.state.weights

    def _excuse(self) -> None:
        """Let the time run of those parties alone that the others wait for."""
        waits_for = self._server.waits_for
        for number, part in self._parts.items():
            if waits_for and number not in waits_for:
                part.until = self._sessions.time_over()

    def _deliver(self, sent: Sequence[Sent]) -> None:
        for each in sent:
            part = self._parts[each.number]
            part.heard.append(each.arrived)
            part.stream.send(each.data)

    def _fail(self, why: str) -> None:
        """Let the sessions of all parties fail, those that have not by themselves for this reason."""
        self._server.state = self._server.state._replace(weights={})
        for part in self._parts.values():
            part.failed = part.failed or why
            self._sessions.leave(part)
