"""A round of split learning on a server: its machines, fed by the clients' streams, in a thread of the run.

A session is a function of the task and the layers at its start, so that nothing of it is written down: a server that
was killed begins the round's sessions anew, and a client that was killed hears the stream down again. Both end with the
bits of the simulation. A client that is silent for too long, leaves, or sends what is not due fails, as one does in a
simulation whose values are not finite. Shapes: M values of a model.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from atoll.core.aggregator import Aggregator
from atoll.core.messages import Task
from atoll.core.seeds import generator
from atoll.network.server.held import HeldRound, RoundContext, Sessions
from atoll.network.server.streams import Stream
from atoll.split.clock import Link, Moment
from atoll.split.exchange import server_side
from atoll.split.half import Half
from atoll.split.machines import ServerState
from atoll.split.messages import ENCODED, VALUES, Kind, Message, NotFinite, SplitError, read_message
from atoll.split.outcome import joined, traffic_of, updates_of
from atoll.split.parties import Parties
from atoll.split.session import Phase
from atoll.train.exchange import Work, received
from atoll.train.trainer import explained

MOST_AT_ONCE = 16
"""Sessions that are open at a time where each has layers of the server's of its own."""


@final
class RemoteExchange:
    """One client's session: the server's machine, and what was sent."""

    def __init__(self, parties: Parties, task: Task, half: Half, now: Moment, stream: Stream) -> None:
        self.task, self.now, self.failed, self.offends, self.stream = task, now, "", False, stream
        self.bytes, self.messages = Counter[tuple[str, bool]](), 0
        self.weights: Tensor | None = None
        self.half, self.stated_loss = half, math.nan if parties.states_loss(task.client) else None
        self._codec, self._attempt = parties.codec, task.attempt
        num_steps = parties.job.num_steps(task.client, task.work)
        self._machine = server_side(parties, task, half, num_steps)
        self._state, self._link = ServerState(), Link.of(parties.split, now)
        self._heard: list[Moment] = []
        """When each message down arrived."""
        self.until = math.inf

    @property
    def step(self) -> int:
        """Return the number of the present batch."""
        return self._state.step

    @property
    def has_ended(self) -> bool:
        """Return whether the client's layers are here."""
        return self.weights is not None

    @property
    def trains(self) -> bool:
        """Return whether batches are due."""
        return not self.failed and self._state.phase is Phase.TRAINING

    @property
    def loss(self) -> float:
        """Return the mean loss of the batches so far."""
        if self.stated_loss is not None:
            return self.stated_loss
        losses = self._state.losses
        return float(torch.stack(losses).mean()) if losses else math.nan

    def start(self, values: Tensor) -> None:
        """Send the client its layers."""
        self._down(Message(Kind.WEIGHTS, self.task.client, 0, arrays={VALUES: values}), self.now)

    def take(self, cause: int, data: bytes, free: Moment) -> Moment:
        """Process a message; `free` is when the server is, and will be, free."""
        try:
            with explained():
                return self._take(cause, data, free)
        except NotFinite as error:
            self.failed = str(error)
        except SplitError as error:
            self.failed, self.offends = str(error), True
        return free

    def _take(self, cause: int, data: bytes, free: Moment) -> Moment:
        message = read_message(self._codec, data)
        self._count("up", message.kind, len(data))
        arrived = self._link.send("up", len(data), self._heard[min(cause, len(self._heard) - 1)])
        self.now = self.now.later(arrived)
        is_last = message.kind == Kind.WEIGHTS
        taken = arrived if is_last else arrived.later(free)
        self._state, answers = self._machine.handle(self._state, message)
        if is_last:
            self.weights = message.values
        for answer in answers:
            self._down(answer, taken)
        return free if is_last else taken

    def _down(self, message: Message, ready: Moment) -> None:
        data = self._codec.encode(message, self._attempt)
        self._count("down", message.kind, len(data))
        arrived = self._link.send("down", len(data), ready)
        self._heard.append(arrived)
        self.now = self.now.later(arrived)
        self.stream.send(data)

    def _count(self, way: str, kind: Kind, num_bytes: int) -> None:
        self.bytes[way, kind in ENCODED] += num_bytes
        self.messages += 1


@final
class SplitRound:
    """Holds the sessions of a cohort in the plan's way."""

    def __init__(self, parties: Parties, tasks: Sequence[Task], start_M: Tensor, context: RoundContext) -> None:
        self._parties, self._tasks, self._start_M = parties, tasks, start_M
        self._sessions = Sessions(context)

    def hold(self) -> HeldRound:
        """Hold all sessions; Refused if the run does not want them any more."""
        way, job = self._parties.way, self._parties.job
        try:
            if way.hands_on:
                exchanges, ends = self._in_turn()
            elif way.own_server:
                exchanges, ends = self._at_once()
            else:
                exchanges, ends = self._together()
        finally:
            self._sessions.close_all()
        updates = dict(zip(self._tasks, updates_of(job, self._start_M, exchanges, ends), strict=True))

        def work_of(task: Task, fold: Aggregator) -> Work:
            update, told = updates[task]
            return received(job, fold, [task], update.alone(), [told])

        return HeldRound(
            work_of=work_of,
            traffic=traffic_of(self._parties, exchanges),
            reports=self._sessions.reports,
            signed=self._sessions.signed,
            failed={each.task: each.failed for each in exchanges if each.failed},
            offenders=tuple(each.task.client for each in exchanges if each.offends),
        )

    def _in_turn(self) -> tuple[list[RemoteExchange], list[Tensor]]:
        """Train clients in turn; one that fails hands on what it began with."""
        half, now, model_M = self._half(), Moment(), self._start_M
        exchanges = list[RemoteExchange]()
        for task in self._tasks:
            half.restore(self._parties.cut.server.take(model_M))
            exchange = self._begun(task, half, model_M, now)
            while exchange.trains:
                self._batch(exchange, Moment())
            self._close(exchange)
            now = exchange.now
            if not exchange.failed:
                model_M = self._joined(model_M, exchange)
            exchanges.append(exchange)
        return exchanges, [model_M] * len(exchanges)

    def _together(self) -> tuple[list[RemoteExchange], list[Tensor]]:
        """Train clients at once on one set of the server's layers, in the order that is drawn for every step."""
        half = self._half()
        half.restore(self._parties.cut.server.take(self._start_M))
        exchanges = [self._begun(task, half, self._start_M, Moment()) for task in self._tasks]
        step, free = 0, Moment()
        while any(exchange.trains for exchange in exchanges):
            rng = generator(self._parties.job.seed, "split order", self._tasks[0].attempt, step)
            for place in rng.permutation(len(exchanges)).tolist():
                if exchanges[place].trains:
                    free = self._batch(exchanges[place], free)
            step += 1
        for exchange in exchanges:
            self._close(exchange)
        return exchanges, [self._joined(self._start_M, exchange) for exchange in exchanges]

    def _at_once(self) -> tuple[list[RemoteExchange], list[Tensor]]:
        """Train clients at once, each with layers of the server's of its own; so many sessions are open at a time."""
        waiting, halves = deque(self._tasks), list[Half]()
        going, ended = list[RemoteExchange](), dict[Task, tuple[RemoteExchange, Tensor]]()
        while waiting or going:
            while waiting and len(going) < MOST_AT_ONCE:
                half = halves.pop() if halves else self._half()
                half.restore(self._parties.cut.server.take(self._start_M))
                going.append(self._begun(waiting.popleft(), half, self._start_M, Moment()))
            self._sessions.wait(going)
            for exchange in going:
                self._advance(exchange)
            for exchange in [each for each in going if self._sessions.is_over(each)]:
                self._sessions.end(exchange)
                ended[exchange.task] = exchange, self._joined(self._start_M, exchange)
                going.remove(exchange)
                halves.append(exchange.half)
        return [ended[task][0] for task in self._tasks], [ended[task][1] for task in self._tasks]

    def _half(self) -> Half:
        return Half(self._parties.job, self._parties.cut.server)

    def _begun(self, task: Task, half: Half, model_M: Tensor, now: Moment) -> RemoteExchange:
        """Open a client's session."""
        parties = self._parties
        exchange = RemoteExchange(parties, task, half, now, self._sessions.open(parties, task))
        exchange.start(parties.cut.client.take(model_M))
        exchange.until = self._sessions.time_over()
        return exchange

    def _batch(self, exchange: RemoteExchange, free: Moment) -> Moment:
        """Let a client do its present batch; return when the server is free."""
        step, exchange.until = exchange.step, self._sessions.time_over()
        while exchange.trains and exchange.step == step:
            self._sessions.wait([exchange])
            free = self._advance(exchange, free, up_to=step)
        return free

    def _close(self, exchange: RemoteExchange) -> None:
        """Take a client's layers and its word at the end."""
        exchange.until = self._sessions.time_over()
        while not self._sessions.is_over(exchange):
            self._sessions.wait([exchange])
            self._advance(exchange)
        self._sessions.end(exchange)

    def _advance(self, exchange: RemoteExchange, free: Moment | None = None, up_to: int | None = None) -> Moment:
        """Process the messages of a client that are here, of one batch if `up_to` names it."""
        free = free or Moment()
        while not exchange.failed and up_to in (None, exchange.step) and (taken := exchange.stream.take()) is not None:
            step = exchange.step
            free = exchange.take(taken.cause, taken.data, free)
            if exchange.step != step:
                exchange.until = self._sessions.time_over()
        if not exchange.failed:
            self._sessions.look(exchange)
        if exchange.failed:
            self._sessions.leave(exchange)
        return free

    def _joined(self, like_M: Tensor, exchange: RemoteExchange) -> Tensor:
        weights = None if exchange.failed else exchange.weights
        return joined(self._parties.cut, like_M, weights, exchange.half.vector)
