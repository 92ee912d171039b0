"""One client's session in a simulation: both machines, their messages as bytes, and what these take."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable
from typing import final

import torch
from torch import Tensor

from atoll.core.messages import Task
from atoll.split.clock import Link, Moment
from atoll.split.half import Half
from atoll.split.machines import ClientMachine, ClientState, ServerMachine, ServerState
from atoll.split.messages import ENCODED, VALUES, Kind, Message, NotFinite, must_be_finite
from atoll.split.parties import Parties
from atoll.split.session import session_of
from atoll.train.batches import client_batches
from atoll.train.loop import load_batch
from atoll.train.trainer import explained


@final
class Exchange:
    """One client's session: both machines, what is on its way, and what it took."""

    def __init__(self, parties: Parties, task: Task, client: Half, server: Half, now: Moment) -> None:
        self._codec, self._cut, self._attempt = parties.codec, parties.cut, task.attempt
        self._heard = parties.heard
        self.task, self.now, self.failed = task, now, ""
        self.bytes, self.messages = Counter[tuple[str, bool]](), 0
        """(direction, whether it crosses the cut) -> bytes; and the number of messages."""
        self._client = client_side(parties, task, client)
        self._server = server_side(parties, task, server, self._client.session.num_steps)
        self._states: tuple[ClientState, ServerState] = ClientState(), ServerState()
        self._link, self._outbox = Link.of(parties.split, now), deque[tuple[Moment, Message]]()
        self.weights: Tensor | None = None
        """The client's layers at the end."""

    @property
    def is_done(self) -> bool:
        """Whether the client has sent its layers, or the session failed."""
        return self.weights is not None or bool(self.failed)

    @property
    def loss(self) -> float:
        """Mean loss of the batches so far, as the ordinary loop has it."""
        losses = self._states[1].losses if self._cut.tail is None else self._states[0].losses
        return float(torch.stack(losses).mean()) if losses else math.nan

    def start(self, values: Tensor) -> None:
        """Give the client its layers."""
        weights = Message(Kind.WEIGHTS, self.task.client, 0, arrays={VALUES: values})
        self._guarded(lambda: self._down(weights, self.now))

    def advance(self, free: Moment) -> Moment:
        """Exchange a batch, and take the layers after the last; `free` is when the server is, and will be, free."""

        def batch() -> None:
            nonlocal free
            step = self._outbox[0][1].step
            while self._outbox and self._outbox[0][1].step == step:
                ready, message = self._outbox.popleft()
                free = self._up(message, ready, free)
            if self._outbox and self._outbox[0][1].kind == Kind.WEIGHTS:
                ready, message = self._outbox.popleft()
                self._up(message, ready, Moment())

        self._guarded(batch)
        return free

    def _guarded(self, exchange: Callable[[], None]) -> None:
        """Let messages be exchanged; values that are not finite end the session."""
        try:
            with explained():
                exchange()
        except NotFinite as error:
            self.failed = str(error)

    def _up(self, message: Message, ready: Moment, free: Moment) -> Moment:
        message, num_bytes = self._encoded("up", message)
        if message.kind == Kind.WEIGHTS and not self._server.takes_weights:
            must_be_finite("the client's layers", message.values)
            self.weights = message.values
            return ready  # it is the message that the next client gets, which counts its time
        arrived = self._link.send("up", num_bytes, ready)
        self.now = self.now.later(arrived)
        taken = arrived.later(free)
        state, answers = self._server.handle(self._states[1], message)
        self._states = self._states[0], state
        if message.kind == Kind.WEIGHTS:
            self.weights = message.values
        for answer in answers:
            self._down(answer, taken)
        return taken

    def _down(self, message: Message, ready: Moment) -> None:
        message, num_bytes = self._encoded("down", message)
        arrived = self._link.send("down", num_bytes, ready)
        self.now = self.now.later(arrived)
        state, answers = self._client.handle(self._states[0], message)
        self._states = state, self._states[1]
        self._outbox.extend((arrived, answer) for answer in answers)

    def _encoded(self, way: str, message: Message) -> tuple[Message, int]:
        """Send a message as bytes, and count them."""
        data = self._codec.encode(message, self._attempt)
        self.bytes[way, message.kind in ENCODED] += len(data)
        handed_on = message.kind == Kind.WEIGHTS and not self._server.takes_weights and way == "up"
        self.messages += not handed_on  # to the next client, which counts it
        arrived = self._codec.decode(data)
        if self._heard is not None:
            self._heard(way, arrived, self._attempt)
        return arrived, len(data)


def client_side(parties: Parties, task: Task, half: Half) -> ClientMachine:
    """Return the client's machine of a task, which takes the batches of the ordinary loop."""
    job, split = parties.job, parties.split
    indices, nothing = client_batches(job, task), job.first_D[:0]
    return ClientMachine(
        cut=parties.cut,
        half=half,
        session=session_of(job, task, len(indices), split.micro_batches),
        load=lambda step: load_batch(job, torch.from_numpy(indices[step]), task, nothing, step),
        in_flight=split.in_flight or split.micro_batches,
        shield=parties.shield,
    )


def server_side(parties: Parties, task: Task, half: Half, num_steps: int) -> ServerMachine:
    """Return the server's machine of a task of so many batches."""
    split = parties.split
    return ServerMachine(
        cut=parties.cut,
        half=half,
        session=session_of(parties.job, task, num_steps, split.micro_batches),
        holders={task.client: parties.cut.shape},
        labels=task.client,
        takes_weights=split.handover == "server",
        shield=parties.shield,
    )
