"""HTTPS with limits: no request may take for ever to arrive, and none is read further than was agreed."""

from __future__ import annotations

import asyncio
import socket
import ssl
from asyncio.sslproto import SSLProtocol
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from atoll.core.errors import RunError

App = Callable[[Any, Any, Any], Awaitable[None]]

REQUEST_SECONDS = 60.0
"""How long a client may take to send a request."""
IDLE_SECONDS = 75
"""How long a connection without a request is kept: longer than a client waits between two polls."""
MAX_HEAD = 64 * 1024
"""Bytes of a request's head, about: what is longer is cut off."""
TLS_RECORD = 16 * 1024
"""Bytes of asyncio's TLS buffer; its default of 256 KiB is most of what a waiting connection costs."""
SEALED, PLAIN = 64 * 1024, 128 * 1024
"""Bytes that are read from a socket at a time, and room for what is decrypted of them: all connections share both."""
BACKLOG = 2048
"""How many connections may wait to be taken."""
GOODBYE_SECONDS = 5
"""How long a shutdown waits for answers that are on their way."""


class PromptProtocol(HttpToolsProtocol, asyncio.BufferedProtocol):
    """uvicorn's HTTP/1.1, with a deadline for each request and a limit to its head: who drips bytes is cut off.

    What is read lies in buffers that the connections of a server share: it is read on before another one reads.
    """

    request_seconds = REQUEST_SECONDS
    sealed: bytearray
    plain: memoryview
    _deadline: asyncio.TimerHandle | None = None
    _head_bytes = 0
    _in_head = True
    _whole = False
    _held = False
    _parts: list[bytes]

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Expect a request; answers leave at once, which asyncio sees to only on sockets that it made itself."""
        super().connection_made(transport)
        self._parts = []
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        tls = getattr(transport, "_ssl_protocol", None)
        if isinstance(tls, SSLProtocol):
            tls._ssl_buffer, tls._ssl_buffer_view = self.sealed, memoryview(self.sealed)  # type: ignore[attr-defined]
        self._await_request()

    def get_buffer(self, sizehint: int) -> memoryview:
        """Where decrypted bytes are put."""
        return self.plain

    def buffer_updated(self, nbytes: int) -> None:
        """Some are there."""
        self.data_received(self.plain[:nbytes])  # type: ignore[arg-type]

    def data_received(self, data: bytes) -> None:
        """Take some bytes of a request; when it is whole the clock stops."""
        if self._deadline is None:
            self._await_request()
        self._head_bytes += len(data) if self._in_head else 0
        super().data_received(data)
        if self._whole:
            self._whole = False
            self._stop_clock()
        elif not self._in_head and not self._held:  # the rest of the body is read when somebody wants it
            self._held = True
            self.flow.pause_reading()
        if self._head_bytes > MAX_HEAD and not self.transport.is_closing():
            self.send_400_response("the head of this request does not end")

    def on_message_begin(self) -> None:
        """The first bytes of a request are here."""
        self._whole = self._held = False
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """The head is whole."""
        self._in_head, self._head_bytes = False, 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Gather the body, which is read once it is whole: nobody waits for it before its length is agreed."""
        if not self.cycle.response_complete:
            self._parts.append(body)

    def on_message_complete(self) -> None:
        """The request is whole."""
        self._in_head, self._head_bytes, self._whole = True, 0, True
        self.cycle.body = b"".join(self._parts)  # type: ignore[assignment]
        self._parts = []
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Drop what came of a request that was answered before it was whole."""
        if self.cycle.response_complete:  # else it is the next one that comes already
            self._parts = []
        super().on_response_complete()

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
    SSLProtocol.max_size = TLS_RECORD
    buffers = {"sealed": bytearray(SEALED), "plain": memoryview(bytearray(PLAIN))}
    protocol = type("Protocol", (PromptProtocol,), {"request_seconds": seconds, **buffers})
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


def agreed_length(headers: dict[str, str], most: int) -> int:
    """How many bytes a request's body has; it must be said, and be at most `most`."""
    said = headers.get("content-length", "0")
    if "transfer-encoding" in headers or not (said.isascii() and said.isdigit()) or int(said[:19]) > most:
        raise TooLarge(
            f"a request of {said[:19]} bytes, at most {most:,} are taken here: say a Content-Length below that"
        )
    return int(said)


async def read_body(receive: Callable[[], Awaitable[Any]], most: int) -> bytes:
    """Read a request's body of at most so many bytes; nothing is set aside for what a header merely claims."""
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
