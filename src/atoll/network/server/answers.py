"""What each endpoint answers, as a function of the request and its parsed body; all but polls run in threads."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import msgspec

from atoll.network.protocol.endpoint import MAX_CONTROL
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
    Missing,
    Nonce,
    Refusal,
    RunInfo,
    Welcome,
)
from atoll.network.server.logs import log
from atoll.network.server.operations import Operations
from atoll.network.server.request import Request


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

    def run(self, request: Request, body: None) -> RunInfo:
        """Describe a run."""
        return self._handler.run_info(request.run)

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
