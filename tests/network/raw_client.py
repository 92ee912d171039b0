"""Clients without data: they speak the protocol, well or badly, and send what a test tells them to.

Shapes: D parameters.
"""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
import time
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from network.federation import Federation
from torch import Tensor

from atoll.core.messages import Payload, State
from atoll.core.wire import pack, unpack
from atoll.network.client.connection import tls_context
from atoll.network.protocol.endpoints import METADATA_HEADER
from atoll.network.protocol.identity import Stamp, client_id, public_bytes, session_request, sign
from atoll.network.protocol.messages import (
    Answer,
    Challenge,
    Delivery,
    Hello,
    Message,
    Order,
    Orders,
    Poll,
    update_text,
)
from atoll.network.protocol.objects import Manifest, cut, manifest_of
from atoll.network.server.store import Store

A = TypeVar("A", bound=Message)
TASK = "/v1/runs/{run}/tasks/{attempt}"
"""The path of a task, as docs/protocol.md says: tests do not take it from the code."""
NUM_PARAMS = 650
"""Of the logistic model on digits."""


class RawResponse(NamedTuple):
    """An answer."""

    status: int
    body: bytes
    last: bool = False
    """The server hangs up after it."""

    @property
    def error(self) -> str:
        """What is wrong, in the server's words."""
        return str(json.loads(self.body)["error"])

    def read(self, kind: type[A]) -> A:
        """The message, if it is one."""
        assert self.status == 200, (self.status, self.body)
        return msgspec.json.decode(self.body, type=kind)


class RawConnection:
    """One connection over TLS, on which bytes are sent as they are."""

    def __init__(self, port: int, certs: Path, seconds: float = 20.0) -> None:
        plain = socket.create_connection(("127.0.0.1", port), timeout=seconds)
        self.socket = _context(certs).wrap_socket(plain, server_hostname="localhost")
        self._rest = b""

    def __enter__(self) -> RawConnection:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Hang up."""
        with contextlib.suppress(OSError):
            self.socket.close()

    def say(self, data: bytes) -> None:
        """Send bytes."""
        self.socket.sendall(data)

    def hear(self) -> RawResponse:
        """The next answer; status 0 if the other side hangs up instead."""
        try:
            while b"\r\n\r\n" not in self._rest:
                if not self._more():
                    return RawResponse(0, self._rest)
            head, _, self._rest = self._rest.partition(b"\r\n\r\n")
            said = [int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
            length = said[0] if said else 0
            while len(self._rest) < length:
                if not self._more():
                    return RawResponse(0, self._rest)
        except (ConnectionError, ssl.SSLEOFError):
            return RawResponse(0, self._rest)
        body, self._rest = self._rest[:length], self._rest[length:]
        return RawResponse(int(head.split()[1]), body, b"connection: close" in head.lower())

    def _more(self) -> bool:
        piece = self.socket.recv(1 << 16)
        self._rest += piece
        return bool(piece)


def request(method: str, path: str, body: bytes = b"", headers: dict[str, str] | None = None) -> bytes:
    """A request as it travels."""
    lines = {"host": "localhost", "content-length": str(len(body)), **(headers or {})}
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    return f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode("latin-1") + body


class RawClient:
    """A client of the federation that has no data; every request is made once."""

    def __init__(self, port: int, certs: Path, key: Ed25519PrivateKey | None = None) -> None:
        self.port, self.certs, self.key = port, certs, key or Ed25519PrivateKey.generate()
        self.id = client_id(public_bytes(self.key))
        self.line: RawConnection | None = None
        self.epoch, self.counter, self.number = 0, 0, -1

    def send(self, data: bytes) -> RawResponse:
        """Send a request, on a new connection if there is none."""
        self.line = self.line or RawConnection(self.port, self.certs)
        try:
            self.line.say(data)
            said = self.line.hear()
        except (ConnectionError, ssl.SSLError):
            said = RawResponse(0, b"")
        if said.status == 0 or said.last:
            self.hang_up()
        return said

    def hang_up(self) -> None:
        """Close the connection."""
        if self.line is not None:
            self.line.close()
            self.line = None

    def plain(self, method: str, path: str, body: bytes | Message = b"") -> RawResponse:
        """A request that is not signed."""
        return self.send(request(method, path, _bytes(body)))

    def signed(self, method: str, path: str, body: bytes | Message = b"", **stamp: Any) -> bytes:
        """A signed request as it travels; `stamp` changes what is stamped on it."""
        self.counter += 1
        made = Stamp(self.id, self.epoch, self.counter, int(time.time()))._replace(**stamp)
        data = _bytes(body)
        return request(method, path, data, sign(self.key, made, method, path, data).headers())

    def ask(self, method: str, path: str, body: bytes | Message = b"", **stamp: Any) -> RawResponse:
        """Make a signed request."""
        return self.send(self.signed(method, path, body, **stamp))

    def begin(self) -> RawResponse:
        """Begin a session."""
        nonce = json.loads(self.plain("POST", "/v1/challenge", Challenge(self.id)).body)["nonce"]
        said = self.plain("POST", "/v1/session", Hello(self.id, nonce, self.key.sign(session_request(self.id, nonce))))
        if said.status == 200:
            welcome = json.loads(said.body)
            self.epoch, self.number, self.counter = welcome["epoch"], welcome["number"], 0
        return said

    def orders(self, wait: float = 10.0, num_samples: int = 10) -> tuple[Order, ...]:
        """What there is to do; another session is begun if the server has forgotten this one."""
        said = self.ask("POST", "/v1/poll", Poll(num_samples, wait))
        if said.status in (0, 401):
            assert self.begin().status == 200
            said = self.ask("POST", "/v1/poll", Poll(num_samples, wait))
        return said.read(Orders).orders

    def order(self, seconds: float = 20.0, num_samples: int = 10) -> Order:
        """Wait for something to do."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            for order in self.orders(min(10.0, max(0.0, end - time.monotonic())), num_samples):
                return order
        raise AssertionError(f"client {self.number} has nothing to do for {seconds} s")

    def model(self, order: Order) -> Tensor:
        """The broadcast of an order."""
        said = self.ask("GET", f"/v1/runs/{order.run}/objects/{order.model.name}")
        manifest = msgspec.msgpack.decode(said.body, type=Manifest)
        path = f"/v1/runs/{order.run}/objects/{order.model.name}"
        data = b"".join(self.ask("GET", f"{path}/{index}").body for index in range(len(manifest.chunks)))
        return unpack(data, max_bytes=1 << 20).carrier

    def upload(self, order: Order, data: bytes) -> RawResponse | None:
        """Send the chunks of an object; what was refused, if something was."""
        path = TASK.format(run=order.run, attempt=order.attempt)
        manifest = manifest_of(data)
        said = self.ask("POST", f"{path}/missing", Answer(msgspec.msgpack.encode(manifest)))
        if said.status != 200:
            return said
        wanted = set(json.loads(said.body)["chunks"])
        for digest, chunk in zip(manifest.chunks, cut(data), strict=True):
            if digest.hex() in wanted:
                said = self.ask("PUT", f"{path}/chunks/{digest.hex()}", bytes(chunk))
                if said.status != 200:
                    return said
        return None

    def told(self, order: Order, data: bytes, weight: float, loss: float | None, num_samples: int) -> Delivery:
        """What is said of an update."""
        manifest = manifest_of(data)
        told = Delivery(msgspec.msgpack.encode(manifest), num_samples, loss, weight, bytes(64))
        text = update_text(order.run, order.attempt, order.version, manifest.name(), told)
        return msgspec.structs.replace(told, signature=self.key.sign(text))

    def deliver(
        self,
        order: Order,
        data: bytes,
        weight: float = 10.0,
        loss: float | None = 1.0,
        num_samples: int = 10,
        whole: bool = True,
    ) -> RawResponse:
        """Send an update: in one request, or in chunks and say then that it is there."""
        told = self.told(order, data, weight, loss, num_samples)
        path = f"{TASK.format(run=order.run, attempt=order.attempt)}/update"
        if whole and data:
            return self.put(path, data, msgspec.json.encode(told))
        refused = self.upload(order, data)
        return self.ask("POST", path, told) if refused is None else refused

    def put(self, path: str, data: bytes, told: bytes) -> RawResponse:
        """Send bytes, and what is said of them."""
        head, _, body = self.signed("PUT", path, data).partition(b"\r\n\r\n")
        return self.send(head + b"\r\n" + METADATA_HEADER.encode() + b": " + told + b"\r\n\r\n" + body)


def packed(delta_D: Tensor, exact: State | None = None) -> bytes:
    """An update as it travels, with exact extras beside it."""
    return pack(Payload(delta_D).beside(exact or {}), compress=True)


def constant_update(value: float, num: int = NUM_PARAMS) -> bytes:
    """An update that moves every parameter by the same."""
    return packed(torch.full((num,), value))


def approved_raw_clients(made: Federation, num: int, port: int = 0) -> list[RawClient]:
    """Clients 0, 1, ... that are approved already; before the server starts."""
    made.home.mkdir(parents=True, exist_ok=True)
    raw_clients = [RawClient(port or made.port, made.certs) for _ in range(num)]
    store = Store(made.store or f"sqlite:///{made.home}/store.db")
    with store.write() as tables:
        for number, raw_client in enumerate(raw_clients):
            tables.add_client(raw_client.id, f"light {number}", public_bytes(raw_client.key))
            assert tables.approve(raw_client.id) == number
    store.close()
    return raw_clients


_contexts: dict[Path, ssl.SSLContext] = {}


def _context(certs: Path) -> ssl.SSLContext:
    if certs not in _contexts:
        _contexts[certs] = tls_context(certs / "ca.pem")
    return _contexts[certs]


def _bytes(body: bytes | Message) -> bytes:
    return body if isinstance(body, bytes) else msgspec.json.encode(body)
