"""HTTPS with limits: no request may take for ever to arrive, and none is read further than was agreed."""

from __future__ import annotations

import asyncio
import socket
import ssl
from asyncio.sslproto import SSLProtocol
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from atoll.core.errors import RunError

App = Callable[[Any, Any, Any], Awaitable[None]]

REQUEST_SECONDS = 60.0
"""How long a client may take to send a request."""
IDLE_SECONDS = 75
"""How long a connection without a request is kept: longer than a client waits between two polls."""
TLS_BUFFER = 64 * 1024
"""Bytes of asyncio's TLS buffer; its default of 256 KiB is most of what a waiting connection costs."""
BACKLOG = 2048
"""How many connections may wait to be taken."""
GOODBYE_SECONDS = 5
"""How long a shutdown waits for answers that are on their way."""


class PromptProtocol(H11Protocol):
    """uvicorn's HTTP/1.1, with a deadline for each request: those who drip their bytes are cut off."""

    request_seconds = REQUEST_SECONDS
    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Expect a request; answers leave at once, which asyncio sees to only on sockets that it made itself."""
        super().connection_made(transport)
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._await_request()

    def data_received(self, data: bytes) -> None:
        """Take some bytes of a request; when it is whole, or refused, the clock stops."""
        if self._deadline is None:
            self._await_request()
        super().data_received(data)
        if self.conn.their_state is not h11.SEND_BODY and (
            self.conn.their_state is not h11.IDLE or not self.conn.trailing_data[0]
        ):
            self._stop_clock()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the clock."""
        self._stop_clock()
        super().connection_lost(exc)

    def _await_request(self) -> None:
        self._deadline = self.loop.call_later(self.request_seconds, self._too_slow)

    def _stop_clock(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _too_slow(self) -> None:
        self.transport.abort()


def tls_context(certificate: Path, key: Path, client_authority: Path | None = None) -> ssl.SSLContext:
    """TLS 1.3 and nothing older; with `client_authority` clients need certificates too."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    try:
        context.load_cert_chain(certificate, key)
        if client_authority is not None:
            context.load_verify_locations(client_authority)
            context.verify_mode = ssl.CERT_REQUIRED
    except (OSError, ssl.SSLError) as error:
        raise RunError(
            f"the certificate {certificate} or its key {key} cannot be used ({error}): make some with atoll certs, or "
            "name your own"
        ) from error
    return context


def server_of(app: App, host: str, port: int, tls: ssl.SSLContext | None, seconds: float = REQUEST_SECONDS) -> Any:
    """A uvicorn server that is ready to run; without `tls` it is for this machine only."""
    if tls is None and host not in ("127.0.0.1", "::1", "localhost"):
        raise RunError(f"{host} can be reached from elsewhere: give a certificate, e.g. by atoll certs")
    SSLProtocol.max_size = TLS_BUFFER
    protocol = type("Protocol", (PromptProtocol,), {"request_seconds": seconds})
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        http=protocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=IDLE_SECONDS,
        timeout_graceful_shutdown=GOODBYE_SECONDS,
        ssl_context_factory=None if tls is None else (lambda config, default: tls),
    )
    return uvicorn.Server(config)


def listener_of(host: str, port: int) -> socket.socket:
    """A socket that listens at an address; with port 0 the system chooses one."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise RunError(f"the address {host}:{port} cannot be used ({error}): choose another port or host") from error


class TooLarge(RunError):
    """A body that is longer than was agreed."""


async def read_body(headers: dict[str, str], receive: Callable[[], Awaitable[Any]], most: int) -> bytes:
    """Read a request's body of at most so many bytes; its length must be said, and is believed only as an upper bound.

    Nothing is set aside for what a header merely claims.
    """
    said = headers.get("content-length", "0")
    if "transfer-encoding" in headers or not (said.isascii() and said.isdigit()) or int(said[:19]) > most:
        raise TooLarge(
            f"a request of {said[:19]} bytes, at most {most:,} are taken here: say a Content-Length below that"
        )
    parts, total = [], 0
    while True:
        message = await receive()
        if message["type"] != "http.request":
            raise TooLarge("the client went away before its request was whole")
        part = message.get("body", b"")
        total += len(part)
        if total > most:
            raise TooLarge(f"more than the {most:,} bytes that are taken here")
        parts.append(part)
        if not message.get("more_body"):
            return b"".join(parts)
