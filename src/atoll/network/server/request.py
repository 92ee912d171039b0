"""A request whose sender may make it, as endpoints see it."""

from __future__ import annotations

import hashlib
import re
from http import HTTPStatus
from types import NoneType
from typing import Any, NamedTuple, TypeVar

import msgspec

from atoll.network.protocol.endpoint import Endpoint
from atoll.network.protocol.identity import BODY_HEADER
from atoll.network.protocol.messages import Message, read_message
from atoll.network.server.auth import Refused
from atoll.network.server.connections import TrackedConnection
from atoll.network.server.tables import ClientRow

Body = TypeVar("Body")
M = TypeVar("M", bound=Message)


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
