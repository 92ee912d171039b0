"""A session of several parties in a simulation: their machines and the server's, their messages as bytes."""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import count
from typing import final

import torch
from torch import Tensor

from atoll.alignment.ids import order_tag
from atoll.core.algorithm import Batch
from atoll.core.messages import Task
from atoll.split.clock import Link, Moment
from atoll.split.columns import VerticalParties
from atoll.split.half import Half
from atoll.split.machines import ClientMachine, ClientState, ServerMachine, ServerState
from atoll.split.messages import ENCODED, VALUES, Kind, Message, NotFinite
from atoll.split.session import Session, session_of
from atoll.train.batches import client_batches
from atoll.train.loop import load_batch
from atoll.train.trainer import explained
from atoll.train.vertical import held


def party_session(session: Session, task: Task) -> Session:
    """Return a party's view of the session: batches, rate and seeds are those of the party that holds the labels."""
    return session._replace(task=task)


@final
class JointExchange:
    """One round of parties that hold columns: all machines, what is on its way, and what it took."""

    def __init__(self, parties: VerticalParties, tasks: Sequence[Task], halves: Sequence[Half], server: Half) -> None:
        self._parties, self._attempt = parties, tasks[0].attempt
        by_client = {task.client: task for task in tasks}
        owner = by_client[parties.labels]
        indices = [torch.from_numpy(each) for each in client_batches(parties.job, owner)]
        session = session_of(parties.job, owner, len(indices), parties.split.micro_batches)
        nothing = parties.job.first_D[:0]
        whole = lru_cache(maxsize=1)(lambda step: load_batch(parties.job, indices[step], owner, nothing, step))
        self._machines = {
            number: self._party(number, party_session(session, by_client[number]), half, whole)
            for number, half in enumerate(halves)
        }
        self._server = server_machine(parties, server, session)
        self._states = {number: ClientState() for number in self._machines}
        self._server_state = ServerState()
        self._links = {number: Link.of(parties.split, Moment()) for number in self._machines}
        self._on_way: list[tuple[float, int, Moment, Message]] = []
        self._order, self._ready = count(), dict[tuple[int, int], Moment]()
        self.now, self.failed, self.messages = Moment(), "", 0
        self._at_work = ""
        """Who handles a message."""
        self.bytes = Counter[tuple[int, str, bool]]()
        """(party, direction, whether it crosses the cut) -> bytes."""

    def _party(self, number: int, session: Session, half: Half, whole: Callable[[int], Batch]) -> ClientMachine:
        holder, split = self._parties.holders[number], self._parties.split

        def load(step: int) -> Batch:
            batch = whole(step)
            return batch._replace(x=held(batch.x, holder.places))

        return ClientMachine(
            cut=holder.cut,
            half=half,
            session=session,
            load=load,
            in_flight=split.in_flight or split.micro_batches,
            sends_labels=number == self._parties.labels,
            rows=self._commitment(number),
            shield=self._parties.shield,
        )

    def _commitment(self, number: int) -> bytes:
        """Return what a party says of the rows that it trains on, which are numbers here; a single one says nothing."""
        job = self._parties.job
        rows = job.federation.train_indices(number).astype("<i8").tobytes()
        return order_tag(job.secret, [rows]) if len(self._parties.holders) > 1 else b""

    @property
    def loss(self) -> float:
        """Mean loss of the batches so far, as the ordinary loop has it."""
        tail = self._parties.holders[self._parties.labels].cut.tail
        losses = self._server_state.losses if tail is None else self._states[self._parties.labels].losses
        return float(torch.stack(losses).mean()) if losses else math.nan

    @property
    def weights(self) -> dict[int, Tensor]:
        """The layers of each party at the end."""
        return dict(self._server_state.weights)

    def run(self, first: dict[int, Tensor]) -> None:
        """Give each party its layers and exchange all batches; values that are not finite end the session."""
        try:
            with explained():
                for number, values in first.items():
                    self._down(Message(Kind.WEIGHTS, number, 0, arrays={VALUES: values}), Moment())
                while self._on_way:
                    _, _, arrived, message = heapq.heappop(self._on_way)
                    self._at_server(message, arrived)
        except NotFinite as error:
            self.failed = f"{self._at_work}: {error}"

    def _at_server(self, message: Message, arrived: Moment) -> None:
        """Let the server take a message; it answers when those of all parties are there."""
        self._at_work = f"the server, from {self._parties.holders[message.holder].name}"
        place = message.step, message.piece
        self._ready[place] = arrived.later(self._ready.get(place, Moment()))
        self._server_state, answers = self._server.handle(self._server_state, message)
        for answer in answers:
            self._down(answer, self._ready[place])

    def _down(self, message: Message, ready: Moment) -> None:
        number = message.holder
        self._at_work = self._parties.holders[number].name
        message, arrived = self._sent("down", message, ready)
        self._states[number], answers = self._machines[number].handle(self._states[number], message)
        for answer in answers:
            message, reached = self._sent("up", answer, arrived)
            heapq.heappush(self._on_way, (reached.seconds, next(self._order), reached, message))

    def _sent(self, way: str, message: Message, ready: Moment) -> tuple[Message, Moment]:
        """Send a message as bytes over its party's link, and count them; return it as it arrives, and when."""
        codec, number = self._parties.holders[message.holder].codec, message.holder
        data = codec.encode(message, self._attempt)
        self.bytes[number, way, message.kind in ENCODED] += len(data)
        self.messages += 1
        arrived = self._links[number].send(way, len(data), ready)
        self.now = self.now.later(arrived)
        return codec.decode(data), arrived


def server_machine(parties: VerticalParties, server: Half, session: Session) -> ServerMachine:
    """Return the server's side of a session of all parties."""
    return ServerMachine(
        cut=parties.holders[parties.labels].cut,
        half=server,
        session=session,
        holders={number: holder.cut.shape for number, holder in enumerate(parties.holders)},
        labels=parties.labels,
        sizes={number: holder.cut.client.spec.num_params for number, holder in enumerate(parties.holders)},
        shield=parties.shield,
    )
