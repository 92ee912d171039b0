"""A round of several parties: the server's side for every driver, and a simulation of the parties beside it."""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import count
from typing import NamedTuple, final

import torch
from torch import Tensor

from atoll.alignment.ids import order_tag
from atoll.core.algorithm import Batch
from atoll.core.messages import Task
from atoll.split.clock import Link, Moment
from atoll.split.columns import VerticalParties
from atoll.split.half import Half
from atoll.split.machines import ClientMachine, ClientState, ServerMachine, ServerState
from atoll.split.messages import ENCODED, VALUES, Kind, Message, NotFinite, SplitError, read_message
from atoll.split.session import Phase, Session, session_of
from atoll.train.batches import client_batches
from atoll.train.loop import load_batch
from atoll.train.trainer import explained
from atoll.train.vertical import held

Load = Callable[[int], Batch]
"""Number of a batch -> its samples with all columns, of which a party takes its own."""


class Sent(NamedTuple):
    """A message of the server to a party, and when it arrives."""

    number: int
    data: bytes
    arrived: Moment


def owners_task(parties: VerticalParties, task: Task) -> Task:
    """Return the task of the party that holds the labels, which batches, rate and seeds of all parties follow."""
    return task._replace(client=parties.labels)


def joint_load(parties: VerticalParties, owner: Task) -> tuple[int, Load]:
    """Return the number of batches of a round, and what reads them from rows with all columns."""
    job = parties.job
    indices, nothing = [torch.from_numpy(each) for each in client_batches(job, owner)], job.first_D[:0]
    return len(indices), lru_cache(maxsize=1)(lambda step: load_batch(job, indices[step], owner, nothing, step))


def party_side(
    parties: VerticalParties, task: Task, half: Half, num_steps: int, whole: Load, rows: bytes
) -> ClientMachine:
    """Return a party's machine; `rows` is its commitment to what it trains on."""
    holder, split = parties.holders[task.client], parties.split
    session = session_of(parties.job, owners_task(parties, task), num_steps, split.micro_batches)

    def load(step: int) -> Batch:
        batch = whole(step)
        return batch._replace(x=held(batch.x, holder.places))

    return ClientMachine(
        cut=holder.cut,
        half=half,
        session=session._replace(task=task),
        load=load,
        in_flight=split.in_flight or split.micro_batches,
        sends_labels=task.client == parties.labels,
        rows=rows,
        shield=parties.shield,
    )


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
        names=[holder.name for holder in parties.holders],
    )


@final
class JointServer:
    """The server's side of a round: its machine, messages as bytes, and when they arrive.

    Messages of one party are taken in their order; in which order those of several come changes no bit, as every piece
    of a batch waits for all parties.
    """

    def __init__(self, parties: VerticalParties, task: Task, half: Half, num_steps: int) -> None:
        self._parties, self._attempt, self.half = parties, task.attempt, half
        session = session_of(parties.job, owners_task(parties, task), num_steps, parties.split.micro_batches)
        self.machine = server_machine(parties, half, session)
        self.state = ServerState()
        self._links = {number: Link.of(parties.split, Moment()) for number in range(len(parties.holders))}
        self._ready = dict[tuple[int, int], Moment]()
        self.now, self.messages = Moment(), 0
        self.bytes = Counter[tuple[int, str, bool]]()
        """(party, direction, whether it crosses the cut) -> bytes."""
        self.told_loss: float | None = None
        """The mean loss as the party with the labels states it, where it alone knows."""

    @property
    def loss(self) -> float:
        """Mean loss of the batches so far, as the ordinary loop has it."""
        if self.told_loss is not None:
            return self.told_loss
        losses = self.state.losses
        return float(torch.stack(losses).mean()) if losses else math.nan

    @property
    def waits_for(self) -> set[int]:
        """Return the parties without whose next message nothing goes on."""
        state, all_parties = self.state, set(range(len(self._parties.holders)))
        if state.phase is not Phase.TRAINING:
            return all_parties - set(state.weights)
        behind = {number for here in state.arrived.values() for number in all_parties - set(here)}
        if state.forwards and not behind:
            return {self._parties.labels}
        return behind or all_parties

    def start(self, start_M: Tensor) -> list[Sent]:
        """Take the server's layers of a model, and send each party its own."""
        self.half.restore(self._parties.server.take(start_M))
        layers = [holder.cut.client.take(start_M) for holder in self._parties.holders]
        return [
            self._down(Message(Kind.WEIGHTS, number, 0, arrays={VALUES: values}), Moment())
            for number, values in enumerate(layers)
        ]

    def read(self, number: int, data: bytes) -> Message:
        """Read a party's message; SplitError if it is none of this party."""
        message = read_message(self._parties.holders[number].codec, data)
        if message.holder != number:
            raise SplitError(f"got a message of client {message.holder} from client {number}: send your own")
        return message

    def arrival(self, message: Message, num_bytes: int, ready: Moment) -> Moment:
        """Count a party's message that was ready at a moment; return when it arrives."""
        return self._counted("up", message, num_bytes, ready)

    def take(self, message: Message, arrived: Moment) -> list[Sent]:
        """Process a party's message; the answers go out when those of all parties are there."""
        place = message.step, message.piece
        self._ready[place] = arrived.later(self._ready.get(place, Moment()))
        self.state, answers = self.machine.handle(self.state, message)
        return [self._down(answer, self._ready[place]) for answer in answers]

    def _down(self, message: Message, ready: Moment) -> Sent:
        data = self._parties.holders[message.holder].codec.encode(message, self._attempt)
        return Sent(message.holder, data, self._counted("down", message, len(data), ready))

    def _counted(self, way: str, message: Message, num_bytes: int, ready: Moment) -> Moment:
        """Count a message on its party's link; return when it arrives."""
        self.bytes[message.holder, way, message.kind in ENCODED] += num_bytes
        self.messages += 1
        arrived = self._links[message.holder].send(way, num_bytes, ready)
        self.now = self.now.later(arrived)
        return arrived


@final
class JointExchange:
    """One round in a simulation: the server, the parties' machines, and what is on its way."""

    def __init__(self, parties: VerticalParties, tasks: Sequence[Task], halves: Sequence[Half], server: Half) -> None:
        self._parties, self._attempt = parties, tasks[0].attempt
        by_client = {task.client: task for task in tasks}
        num_steps, whole = joint_load(parties, by_client[parties.labels])
        self._machines = {
            number: party_side(parties, by_client[number], half, num_steps, whole, self._commitment(number))
            for number, half in enumerate(halves)
        }
        self.server = JointServer(parties, by_client[parties.labels], server, num_steps)
        self._states = {number: ClientState() for number in self._machines}
        self._on_way: list[tuple[float, int, Moment, Message]] = []
        self._order = count()
        self.failed, self._at_work = "", ""
        """Why the round has failed; and who handles a message."""

    def _commitment(self, number: int) -> bytes:
        """Return what a party says of the rows that it trains on, which are numbers here; a single one says nothing."""
        job = self._parties.job
        rows = job.federation.train_indices(number).astype("<i8").tobytes()
        return order_tag(job.secret, [rows]) if len(self._parties.holders) > 1 else b""

    def run(self, start_M: Tensor) -> None:
        """Give each party its layers and exchange all batches; values that are not finite end the session."""
        names = [holder.name for holder in self._parties.holders]
        try:
            with explained():
                for sent in self.server.start(start_M):
                    self._at_party(sent)
                while self._on_way:
                    _, _, arrived, message = heapq.heappop(self._on_way)
                    self._at_work = f"the server, from {names[message.holder]}"
                    for sent in self.server.take(message, arrived):
                        self._at_party(sent)
        except NotFinite as error:
            self.failed = f"{self._at_work}: {error}"
        losses = self._states[self._parties.labels].losses
        if self._parties.holders[self._parties.labels].cut.tail is not None:
            self.server.told_loss = float(torch.stack(losses).mean()) if losses else math.nan

    def _at_party(self, sent: Sent) -> None:
        """Let a party take a message, and send what it answers."""
        number = sent.number
        self._at_work = self._parties.holders[number].name
        codec = self._parties.holders[number].codec
        self._states[number], answers = self._machines[number].handle(self._states[number], codec.decode(sent.data))
        for answer in answers:
            data = codec.encode(answer, self._attempt)
            message = self.server.read(number, data)
            reached = self.server.arrival(message, len(data), sent.arrived)
            heapq.heappush(self._on_way, (reached.seconds, next(self._order), reached, message))
