"""Rounds of split learning in a simulation: an engine that lets the machines of a cohort exchange encoded messages.

What the round makes of it (weighted mean, server step, evaluation, rows) is the ordinary commit: the engine gives one
update for each client. Where layers are shared or handed on, the updates of all clients say the same of them, so that
their mean is what the round ended with.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, final

import torch
from torch import Tensor

from atoll.core.errors import PlanError
from atoll.core.messages import Broadcast, State, Task, Update
from atoll.core.parts import find
from atoll.core.plan import Plan
from atoll.core.seeds import generator
from atoll.core.split import Split
from atoll.core.transform import chain, no_memory
from atoll.engine.base import InProcess, Progress, silent
from atoll.split.clock import Link, Moment
from atoll.split.cut import Cut, cut_model
from atoll.split.half import Half
from atoll.split.machines import ClientMachine, ClientState, ServerMachine, ServerState
from atoll.split.messages import ENCODED, VALUES, Codec, Kind, Message, NotFinite
from atoll.split.session import session_of
from atoll.split.way import Way
from atoll.train.batches import client_batches
from atoll.train.exchange import Told, Traffic, Work, received
from atoll.train.job import Job, with_statistics
from atoll.train.loop import load_batch
from atoll.train.trainer import Trainer, explained

HEADER = 4096
"""Bytes that a message may take beside its values."""


class Parties(NamedTuple):
    """What is built once of a plan that is cut."""

    job: Job
    split: Split
    cut: Cut
    way: Way
    codec: Codec


def build_parties(plan: Plan, job: Job) -> Parties:
    """Cut a plan's model and build what its rounds need; refuse what does not fit."""
    split = plan.split
    assert split is not None
    if split.micro_batches > 1 and job.dropout_seeds:
        raise PlanError(
            f"split.micro_batches is {split.micro_batches}, but the masks of dropout go by the place in a batch, and "
            "pieces would get others: set split.micro_batches = 1, or leave dropout out"
        )
    cut = cut_model(job, split)
    way: Way = find("split.ways", split.way)()
    return Parties(job, split, cut, way, _codec(job, split, cut))


def _codec(job: Job, split: Split, cut: Cut) -> Codec:
    transforms = [part.build("transforms", error_feedback=False) for part in split.codecs]
    for part, transform in zip(split.codecs, transforms, strict=True):
        if transform.init is not no_memory or transform.against_known:
            raise PlanError(
                f"split.codecs: {part.name} remembers what it sent before, and batches have nothing in common: use "
                "quantise, half or another that remembers nothing"
            )
    ends = {Kind.ACTIVATIONS: cut.shape, Kind.GRADIENTS: cut.shape}
    ends |= {} if cut.tail is None else {Kind.OUTPUTS: cut.tail_shape, Kind.OUTPUT_GRADIENTS: cut.tail_shape}
    size = 2 * job.spec.dtype.itemsize
    values = max(job.batch_size * max(math.prod(shape) for shape in ends.values()), cut.client.spec.num_params)
    targets = job.batch_size * max(1, job.federation.train_y[:1].numel()) * 8
    codec = Codec(chain(*transforms), job.seed, job.spec.dtype, ends, HEADER + size * values + targets)
    _rehearse_codec(codec, cut)
    return codec


def _rehearse_codec(codec: Codec, cut: Cut) -> None:
    """Send made-up activations of one and of three samples; refuse codecs that do not give them back."""
    for num in (1, 3):
        values = torch.randn((num, *cut.shape), generator=torch.Generator().manual_seed(num), dtype=codec.dtype)
        message = Message(Kind.ACTIVATIONS, 0, 0, 0, 1, num, {VALUES: values})
        try:
            shape = tuple(codec.decode(codec.encode(message, 0)).values.shape)
        except PlanError:
            raise
        except Exception as error:
            text = " ".join(f"{type(error).__name__}: {error}".split())
            raise PlanError(f"split.codecs do not fit activations ({text}): leave a step out") from error
        if shape != tuple(values.shape):
            raise PlanError(f"split.codecs make {shape} of activations of {tuple(values.shape)}: leave a step out")


class Exchange:
    """One client's session: both machines, what is on its way, and what it took."""

    def __init__(self, parties: Parties, task: Task, client: Half, server: Half, now: Moment) -> None:
        job, split, cut = parties.job, parties.split, parties.cut
        indices = client_batches(job, task)
        session = session_of(job, task, len(indices), split.micro_batches)
        self._codec, self._cut, self._attempt = parties.codec, cut, task.attempt
        self.task, self.now, self.failed = task, now, ""
        self.bytes, self.messages = Counter[tuple[str, bool]](), 0
        """(direction, whether it crosses the cut) -> bytes; and the number of messages."""
        nothing = job.first_D[:0]
        self._client = ClientMachine(
            cut=cut,
            half=client,
            session=session,
            load=lambda step: load_batch(job, torch.from_numpy(indices[step]), task, nothing, step),
            in_flight=split.in_flight or split.micro_batches,
        )
        self._server = ServerMachine(
            cut=cut,
            half=server,
            session=session,
            holders={task.client: cut.shape},
            labels=task.client,
            takes_weights=split.handover == "server",
        )
        self._states: tuple[ClientState, ServerState] = ClientState(), ServerState()
        self._link, self._outbox = Link.of(split, now), deque[tuple[Moment, Message]]()
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
        if message.kind == Kind.WEIGHTS:
            self.weights = message.values
        if message.kind == Kind.WEIGHTS and not self._server.takes_weights:
            return ready  # it is the message that the next client gets, which counts its time
        arrived = self._link.send("up", num_bytes, ready)
        self.now = self.now.later(arrived)
        taken = arrived.later(free)
        state, answers = self._server.handle(self._states[1], message)
        self._states = self._states[0], state
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
        return self._codec.decode(data), len(data)


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
        self._delivered = dict(zip(tasks, self._updates(start_M, exchanges, ends), strict=True))
        return super().train(tasks, sent, states)._replace(traffic=_traffic(self.parties, exchanges))

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
                model_M = end_M if exchange.weights is not None else model_M
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
        """Return a whole model of both sides' layers; of a client that failed, NaN, so that it does not count."""
        cut, model_M = self.parties.cut, torch.full_like(like_M, torch.nan)
        if weights is not None:
            cut.client.put(model_M, weights)
            cut.server.put(model_M, self._server.vector)
        return model_M

    def _updates(
        self, start_M: Tensor, exchanges: Sequence[Exchange], ends: Sequence[Tensor]
    ) -> Iterable[tuple[Update, Told]]:
        """Return what each client's update would be; one that failed is not finite, and does not count."""
        job = self.job
        for exchange, end_M in zip(exchanges, ends, strict=True):
            num_samples = job.federation.num_samples(exchange.task.client)
            delta_M = end_M - start_M if not exchange.failed else torch.full_like(start_M, torch.nan)
            weight = torch.tensor(float(num_samples), dtype=job.spec.dtype)
            bytes_up = sum(num for (way, _), num in exchange.bytes.items() if way == "up")
            update = with_statistics(job, Update(job.trainable(delta_M), weight, {}), delta_M)
            yield update, Told(num_samples, exchange.loss, bytes_up)


def _traffic(parties: Parties, exchanges: Iterable[Exchange]) -> Traffic:
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
