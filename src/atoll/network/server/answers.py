"""What each endpoint answers to a request whose head was checked; polls in the event loop, all others in threads."""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from http import HTTPStatus
from types import NoneType
from typing import Any, NamedTuple, TypeVar

import msgspec

from atoll.network.protocol.endpoints import MAX_CONTROL, POLL, Endpoint
from atoll.network.protocol.identity import BODY_HEADER
from atoll.network.protocol.messages import (
    MAX_LINES,
    VERSION,
    About,
    Answer,
    Challenge,
    Delivered,
    Delivery,
    Done,
    Enrol,
    Enrolled,
    Hello,
    Lines,
    Message,
    Missing,
    Nonce,
    OpenRuns,
    Orders,
    Poll,
    Readiness,
    Refusal,
    RunInfo,
    SiteEvaluation,
    Welcome,
    read_message,
)
from atoll.network.server.auth import Refused
from atoll.network.server.limits import TrackedConnection
from atoll.network.server.monitoring import log
from atoll.network.server.operations import Operations
from atoll.network.server.tables import ClientRow

Body = TypeVar("Body")
M = TypeVar("M", bound=Message)
InThread = Callable[[Callable[[], Orders]], Awaitable[Orders]]
"""Runs a function that may wait for the disk outside of the event loop."""


class Request(NamedTuple):
    """A request whose head was checked."""

    sender: ClientRow | None
    """The client that signed it; None for public endpoints."""
    parameters: dict[str, str]
    """What the path names."""
    body: bytes
    body_hash: str
    """SHA-256 of the body in hexadecimal, as the signed head says; `check_body` compares."""
    metadata: str
    """The message in the header, as JSON; "" if there is none."""
    connection: TrackedConnection

    @property
    def client(self) -> ClientRow:
        """Return the client that signed the request."""
        assert self.sender is not None
        return self.sender

    @property
    def run(self) -> str:
        """Return the run in the path."""
        return self.parameters["run"]

    @property
    def attempt(self) -> int:
        """Return the attempt in the path."""
        return self.number("attempt")

    def number(self, name: str) -> int:
        """Return a parameter of the path that is a number."""
        text = self.parameters[name]
        if not re.fullmatch(r"[0-9]{1,15}", text):
            raise Refused(HTTPStatus.NOT_FOUND, "there is nothing of this name")
        return int(text)

    def check_body(self) -> None:
        """Refuse a body that is not the one that was signed."""
        if self.sender is not None and hashlib.sha256(self.body).hexdigest() != self.body_hash:
            raise Refused(HTTPStatus.BAD_REQUEST, f"the body is not the one that {BODY_HEADER} names: send that one")

    def parse(self, endpoint: Endpoint[Body, Any]) -> Body:
        """Read the body as the endpoint's type."""
        kind: Any = endpoint.body
        body: Any = None if kind is NoneType else self.body if kind is bytes else _read(self.body, kind)
        parsed: Body = body
        return parsed

    def parse_metadata(self, kind: type[M]) -> M:
        """Read the message in the header."""
        return _read(self.metadata.encode(), kind)


def _read(data: bytes, kind: type[M]) -> M:
    try:
        return read_message(data, kind)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise Refused(HTTPStatus.BAD_REQUEST, f"the request is not understood ({error}): see the protocol") from error


class Later(NamedTuple):
    """An answer that is waited for when the request's body is not needed any more."""

    wait: Callable[[], Awaitable[bytes]]


class Answers:
    """Turns requests into calls of the authenticator and the request handler, and their results into messages."""

    def __init__(self, operations: Operations) -> None:
        self._authenticator, self._handler = operations.authenticator, operations.handler
        self._server_key = operations.server_key

    def about(self, request: Request, body: None) -> About:
        """Describe the server."""
        return About((VERSION,), self._server_key, int(self._authenticator.now()))

    def enrol(self, request: Request, body: Enrol) -> Enrolled:
        """Enrol a client."""
        client = self._authenticator.enrol(body.token, body.name, body.key, body.signature)
        log("session", client=body.name, why="enrolled")
        return Enrolled(client)

    def challenge(self, request: Request, body: Challenge) -> Nonce:
        """Give a client something to sign."""
        return Nonce(self._authenticator.challenge(body.client))

    def session(self, request: Request, body: Hello) -> Welcome:
        """Begin a session."""
        epoch, client = self._authenticator.open_session(body.client, body.nonce, body.signature)
        assert client.number is not None
        log("session", client=client.name, epoch=epoch)
        return Welcome(epoch, client.number, client.name)

    def runs(self, request: Request, body: None) -> OpenRuns:
        """Describe the runs that have not ended."""
        return OpenRuns(self._handler.open_runs())

    def run(self, request: Request, body: None) -> RunInfo:
        """Describe a run."""
        return self._handler.run_info(request.client, request.run)

    def ledger(self, request: Request, body: None) -> Lines:
        """Send ledger lines, as many as fit into a control message."""
        return Lines(_fitting(self._handler.ledger_lines(request.run, request.number("start"), MAX_LINES)))

    def manifest(self, request: Request, body: None) -> bytes:
        """Send the manifest of an object."""
        name = request.parameters["name"]
        return msgspec.msgpack.encode(self._handler.readable_objects(request.client, request.run, name).manifest(name))

    def get_chunk(self, request: Request, body: None) -> bytes:
        """Send a chunk of an object."""
        name = request.parameters["name"]
        objects = self._handler.readable_objects(request.client, request.run, name)
        return objects.part(name, request.number("index"))

    def missing(self, request: Request, body: Answer) -> Missing:
        """List the chunks that are missing of an object."""
        return self._handler.missing(request.client, request.run, request.attempt, body.manifest)

    def put_chunk(self, request: Request, body: bytes) -> Done:
        """Keep a chunk."""
        digest = request.parameters["digest"]
        self._handler.put_chunk(request.client, request.run, request.attempt, digest, body, request.body_hash)
        return Done()

    def update(self, request: Request, body: Delivery) -> Delivered | Future[Any]:
        """Take an update that was sent in chunks."""
        return self._handler.deliver(request.client, request.run, request.attempt, body)

    def put_update(self, request: Request, body: bytes) -> Delivered | Future[Any]:
        """Take an update that is one chunk."""
        delivery = request.parse_metadata(Delivery)
        return self._handler.deliver(request.client, request.run, request.attempt, delivery, body, request.body_hash)

    def secure(self, request: Request, body: Answer) -> Done:
        """Take an answer in secure aggregation."""
        self._handler.answer_secure(request.client, request.run, request.attempt, body.manifest)
        return Done()

    def ready(self, request: Request, body: None) -> Done:
        """Note that an update waits for secure aggregation."""
        self._handler.ready(request.client, request.run, request.attempt)
        return Done()

    def refuse(self, request: Request, body: Refusal) -> Done:
        """Note that a client refuses a task."""
        self._handler.refuse(request.client, request.run, request.attempt, body)
        return Done()

    def evaluation(self, request: Request, body: SiteEvaluation) -> Done:
        """Take what a client measured of a version."""
        self._handler.evaluated(request.client, request.run, request.number("version"), body)
        return Done()

    def readiness(self, request: Request, body: Readiness) -> Done:
        """Note the result of a client's preflight."""
        self._handler.readiness(request.client, request.run, body)
        return Done()


def _fitting(lines: list[str]) -> tuple[str, ...]:
    """Return the first lines that fit into a control message, but at least one."""
    kept: list[str] = []
    total = 0
    for line in lines:
        total += len(line) + 10
        if kept and total > MAX_CONTROL // 2:
            break
        kept.append(line)
    return tuple(kept)


class WaitingPolls:
    """The polls of one event loop; a client has one at a time."""

    def __init__(self, operations: Operations, in_thread: InThread) -> None:
        self._operations, self._handler, self._in_thread = operations, operations.handler, in_thread
        self._events: dict[int, asyncio.Event] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ending = False

    def end(self) -> None:
        """Answer all polls, so that the process can end."""
        self._ending = True
        for event in self._events.values():
            event.set()

    def wake(self, numbers: set[int]) -> None:
        """Let the polls of these clients look for work again; may be called from any thread."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._set_events, numbers)

    def _set_events(self, numbers: set[int]) -> None:
        for number in numbers:
            event = self._events.get(number)
            if event is not None:
                event.set()

    async def answer(self, request: Request) -> Orders:
        """Return the client's orders as soon as there are some, in the event loop as long as memory is enough."""
        request.check_body()
        poll, number = request.parse(POLL), request.client.number
        assert number is not None
        self._loop = asyncio.get_running_loop()
        event = asyncio.Event()
        before, self._events[number] = self._events.get(number), event
        if before is not None:
            before.set()
        try:
            written = self._handler.note_poll(request.client, poll)
            if written is not None:
                await asyncio.wrap_future(written)
            orders = await self._orders(request.client, poll)
            if (
                not (orders.orders or orders.evaluations)
                and set(orders.ended) <= set(poll.ended)
                and poll.wait
                and not self._ending
            ):
                with self._operations.metrics.waiting():
                    try:
                        await asyncio.wait_for(event.wait(), poll.wait)
                    except TimeoutError:
                        return orders
                orders = await self._orders(request.client, poll)
        finally:
            if self._events.get(number) is event:
                del self._events[number]
        return orders

    async def _orders(self, client: ClientRow, poll: Poll) -> Orders:
        """Look for work; in a thread while the writer holds the lock, which may take as long as files are written."""
        lock = self._operations.driver.writer.lock
        if not lock.acquire(blocking=False):
            return await self._in_thread(lambda: self._handler.orders(client, poll))
        try:
            return self._handler.orders(client, poll)
        finally:
            lock.release()
