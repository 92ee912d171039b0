"""Sessions of a round that a server holds: opening them, waiting, looking who is there, and what clients sign."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from typing import Any, NamedTuple, Protocol, final

from atoll.core.aggregator import Aggregator
from atoll.core.messages import Task
from atoll.network.protocol.exchange import SessionEnd
from atoll.network.server.auth import Refused
from atoll.network.server.streams import OVER, Stream, StreamLimits, Streams
from atoll.split.parties import Parties
from atoll.train.exchange import Traffic, Work

LOOK_SECONDS = 1.0
"""Seconds after which is looked whether the run still wants the round."""


class RoundContext(NamedTuple):
    """What a server needs to hold the sessions of a round."""

    streams: Streams
    seconds: float
    """Seconds in which a client must get a batch done."""
    is_wanted: Callable[[], bool]
    """Whether the run goes on."""
    is_known: Callable[[int], bool]
    """Whether a client is approved."""


class HeldRound(NamedTuple):
    """What the sessions of a round came to."""

    work_of: Callable[[Task, Aggregator], Work]
    """(task, how updates are folded) -> what came of it, made anew in every call."""
    traffic: Traffic
    reports: Mapping[Task, Mapping[str, Any]]
    """What is written of each client that ended its session: its signed numbers and the transcript."""
    signed: Mapping[Task, SessionEnd]
    failed: Mapping[Task, str]
    """Why sessions failed."""
    offenders: tuple[int, ...]
    """Clients that sent what is not due."""


class Held(Protocol):
    """One client's session."""

    task: Task
    failed: str
    """Why it has failed; "" if it has not."""
    offends: bool
    """Whether the client sent what is not due."""
    stated_loss: float | None
    """The mean loss that the client states, where it alone knows it."""
    stream: Stream
    until: float
    """When the present batch must be done, by the monotonic clock."""

    @property
    def has_ended(self) -> bool:
        """Return whether the client's layers are here."""


@final
class Sessions:
    """Opens, watches and ends the sessions of a round."""

    def __init__(self, context: RoundContext) -> None:
        self._context = context
        self.signed: dict[Task, SessionEnd] = {}
        self.reports: dict[Task, Mapping[str, Any]] = {}

    def open(self, parties: Parties, task: Task) -> Stream:
        """Open a client's session, in whose messages `parties` says how long they are."""
        window = 2 * (parties.split.in_flight or parties.split.micro_batches) + 2
        return self._context.streams.open(task.client, StreamLimits(parties.codec.max_bytes, window))

    def time_over(self) -> float:
        """Return when a batch that begins now must be done."""
        return time.monotonic() + self._context.seconds

    def look(self, held: Held) -> None:
        """Let a session fail whose client has left, is not approved any more, or has been silent for too long."""
        end, client = held.stream.end, held.task.client
        if end is not None and end.reason:
            held.failed = f"client {client} left: {end.reason}"
        elif end is not None and not held.has_ended and not held.stream.is_ready:
            held.failed, held.offends = f"client {client} ended its session before it had sent its layers", True
        elif not self._context.is_known(client):
            held.failed = f"client {client} is not approved any more"
        elif time.monotonic() > held.until:
            held.failed = f"client {client} did no batch in {self._context.seconds:g} s"

    def is_over(self, held: Held) -> bool:
        """Return whether nothing more is due of a session."""
        return bool(held.failed) or (held.has_ended and held.stream.end is not None)

    def leave(self, held: Held) -> None:
        """End a session that has failed, and tell its client why."""
        self._context.streams.close(held.stream, f"the server left this session: {held.failed}"[:1000])

    def end(self, held: Held) -> None:
        """Close a session, and keep what the client signed."""
        end = held.stream.end
        if not held.failed and end is not None and end.transcript is not None and end.signature is not None:
            if held.stated_loss is not None:
                held.stated_loss = math.nan if end.loss is None else end.loss
            self.signed[held.task] = end
            self.reports[held.task] = {
                "num_samples": end.num_samples,
                "loss": end.loss,
                "weight": end.weight,
                "broadcast": end.broadcast,
                "session": held.stream.transcript.describe(),
            }
        self._context.streams.close(held.stream, held.failed or OVER)

    def wait(self, sessions: Sequence[Held]) -> None:
        """Wait for messages of clients; Refused if the run does not want the round any more."""
        soonest = min(held.until for held in sessions) - time.monotonic()
        self._context.streams.wait([held.stream for held in sessions], max(0.0, min(LOOK_SECONDS, soonest)))
        if not self._context.is_wanted():
            raise Refused(HTTPStatus.SERVICE_UNAVAILABLE, "the run does not go on")

    def close_all(self) -> None:
        """End whatever is still open."""
        self._context.streams.close_all()
