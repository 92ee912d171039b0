"""HTTPS with deadlines and limits: for the head and the body of each request, and for its length."""

from __future__ import annotations

import asyncio
import socket
import ssl
from asyncio.sslproto import SSLProtocol
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import uvicorn
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from atoll.core.errors import RunError
from atoll.network.server.limits import BACKLOG, ConnectionTracker, Limits, Listener, TrackedConnection

App = Callable[[Any, Any, Any], Awaitable[None]]

HEAD_SECONDS = 15.0
"""Maximum time of a request's head."""
BODY_SECONDS, BODY_RATE = 10.0, 1 << 14
"""Maximum time of a body: these seconds, and one more for each BODY_RATE bytes that have arrived."""
IDLE_SECONDS = 75
"""How long a client's idle connection is kept: longer than it waits between two polls."""
UNAUTHENTICATED_SECONDS = 20
"""How long an idle unauthenticated connection is kept."""
MAX_HEAD = 64 * 1024
"""Approximate maximum bytes of a request's head."""
MAX_DISCARDED = 4 << 20
"""Bytes that are read of a refused body, so that its sender receives the answer: the largest body has one MiB."""
TLS_RECORD = 16 * 1024
"""Bytes of asyncio's TLS buffer; its default of 256 KiB would be most of the memory of an idle connection."""
ENCRYPTED_BYTES, DECRYPTED_BYTES = 64 * 1024, 128 * 1024
"""Sizes of the read buffers of encrypted and decrypted bytes, which all connections share."""
GOODBYE_SECONDS = 5
"""Seconds that a shutdown waits for answers in progress."""
UNIQUE_HEADERS = frozenset({"host", "content-length", "transfer-encoding", "authorization"})
"""Headers that must not be repeated, as all of Atoll's own: two readers might take different ones."""
CONNECTION = "atoll.connection"
"""The extension of the ASGI scope that holds the request's connection."""


class RequestTimeouts(NamedTuple):
    """Deadlines of a request."""

    head: float = HEAD_SECONDS
    body: float = BODY_SECONDS
    rate: float = BODY_RATE


TIMEOUTS, LIMITS = RequestTimeouts(), Limits()


class NotifyingFlowControl(FlowControl):
    """uvicorn's flow control, with a callback when reading resumes."""

    def __init__(self, transport: asyncio.Transport, resumed: Callable[[], None]) -> None:
        super().__init__(transport)
        self._body_resumed = resumed

    def resume_reading(self) -> None:
        """Resume reading."""
        if self.read_paused:
            self._body_resumed()
        super().resume_reading()


class DeadlineProtocol(HttpToolsProtocol, asyncio.BufferedProtocol):
    """uvicorn's HTTP/1.1 with deadlines for the head and the body of each request, and a limit of the head.

    A body is not read before the application asks for it, which starts its deadline. Buffers are shared by all
    connections of a server: what is read into them is consumed before another connection reads.
    """

    timeouts: RequestTimeouts
    encrypted: bytearray
    decrypted: memoryview
    _timer: asyncio.TimerHandle | None = None
    _since = 0.0
    """When reading of the body began."""
    _body_bytes = 0
    _head_bytes = 0
    _in_head = True
    _complete = False
    _paused = False
    _parts: list[bytes]

    def __init__(self, connection: TrackedConnection, **options: Any) -> None:
        super().__init__(**options)
        self._connection = connection
        self._parts = []
        self.timeout_keep_alive = UNAUTHENTICATED_SECONDS

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the deadline of the first head; set TCP_NODELAY, as asyncio does only on sockets that it made."""
        super().connection_made(transport)
        self._connection.abort = transport.abort
        self.flow = NotifyingFlowControl(transport, self._body_resumed)
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        tls = getattr(transport, "_ssl_protocol", None)
        if isinstance(tls, SSLProtocol):
            tls._ssl_buffer, tls._ssl_buffer_view = self.encrypted, memoryview(self.encrypted)  # type: ignore[attr-defined]
        self._start_timer(self.timeouts.head)

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return the shared buffer of decrypted bytes."""
        return self.decrypted

    def buffer_updated(self, nbytes: int) -> None:
        """Consume decrypted bytes."""
        self.data_received(self.decrypted[:nbytes])  # type: ignore[arg-type]

    def data_received(self, data: bytes) -> None:
        """Consume bytes of a request; stop its deadline when it is complete."""
        if self._timer is None:
            self._start_timer(self.timeouts.head)
        if self._in_head:
            self._head_bytes += len(data)
        else:
            self._body_bytes += len(data)
        super().data_received(data)
        if self._complete:
            self._complete = False
            self._stop_timer()
        elif not self._in_head and not self._paused:  # the application resumes when it wants the body
            self._paused = True
            self._stop_timer()
            self.flow.pause_reading()
        if not self._in_head and self._body_bytes > MAX_DISCARDED and self.cycle.response_complete:
            self.transport.abort()
        if self._head_bytes > MAX_HEAD and not self.transport.is_closing():
            self.send_400_response("the head of this request does not end")

    def on_message_begin(self) -> None:
        """Start the deadline of a head."""
        self._complete = self._paused = False
        self._start_timer(self.timeouts.head)
        super().on_message_begin()
        self.scope["extensions"] = {CONNECTION: self._connection}  # type: ignore[dict-item]

    def on_headers_complete(self) -> None:
        """Count bytes as those of the body from now on."""
        self._in_head, self._head_bytes, self._body_bytes = False, 0, 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Collect the body, which the application gets when it is complete."""
        if not self.cycle.response_complete:
            self._parts.append(body)

    def on_message_complete(self) -> None:
        """Hand the complete body to the application."""
        self._in_head, self._head_bytes, self._complete = True, 0, True
        self.cycle.body = b"".join(self._parts)  # type: ignore[assignment]
        self._parts = []
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Drop the body of a request that was answered before it was complete."""
        if self.cycle.response_complete:  # else these are bytes of the next request
            self._parts = []
        self.timeout_keep_alive = IDLE_SECONDS if self._connection.client else UNAUTHENTICATED_SECONDS
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the deadline, and release the connection."""
        self._stop_timer()
        self._connection.release()
        super().connection_lost(exc)

    def _body_resumed(self) -> None:
        """Start the deadline of a body, unless it runs."""
        if not self._in_head and self._timer is None:
            self._since, self._body_bytes = self.loop.time(), 0
            self._start_timer(self.timeouts.body)

    def _start_timer(self, seconds: float) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(seconds, self._check_deadline)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check_deadline(self) -> None:
        """Close the connection of a request that is too slow; extend the time of a body that is not."""
        self._timer = None
        left = 0.0
        if not self._in_head:
            left = self._since + self.timeouts.body + self._body_bytes / self.timeouts.rate - self.loop.time()
        if left > 0:
            self._start_timer(left)
        else:
            self.transport.abort()


class WebServer(uvicorn.Server):
    """uvicorn's server with a listener that limits connections."""

    def __init__(self, config: uvicorn.Config, tls: ssl.SSLContext | None, limits: Limits) -> None:
        super().__init__(config)
        self._tls, self._tracker = tls, ConnectionTracker(limits)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start listening."""
        await self.lifespan.startup()

        def protocol(connection: TrackedConnection) -> asyncio.BaseProtocol:
            make: Any = self.config.http_protocol_class
            created: asyncio.BaseProtocol = make(
                connection, config=self.config, server_state=self.server_state, app_state=self.lifespan.state
            )
            return created

        sockets = sockets or [listening_socket(self.config.host, self.config.port)]
        self.servers: list[Any] = [Listener(each, protocol, self._tls, self._tracker) for each in sockets]
        self.started = True


def tls_context(certificate: Path, key: Path, client_authority: Path | None = None) -> ssl.SSLContext:
    """Make a context of TLS 1.3; with `client_authority`, clients need certificates too."""
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


def web_server(
    app: App,
    host: str,
    port: int,
    tls: ssl.SSLContext | None,
    timeouts: RequestTimeouts = TIMEOUTS,
    limits: Limits = LIMITS,
) -> WebServer:
    """Make a server of an ASGI application; without `tls` it must be for this machine only."""
    if tls is None and host not in ("127.0.0.1", "::1", "localhost"):
        raise RunError(f"{host} can be reached from elsewhere: give a certificate, e.g. by atoll certs")
    SSLProtocol.max_size = TLS_RECORD
    buffers = {"encrypted": bytearray(ENCRYPTED_BYTES), "decrypted": memoryview(bytearray(DECRYPTED_BYTES))}
    protocol = type("Protocol", (DeadlineProtocol,), {"timeouts": timeouts, **buffers})
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
    )
    return WebServer(config, tls, limits)


def listening_socket(host: str, port: int) -> socket.socket:
    """Open a listening socket; with port 0 the system chooses one."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise RunError(f"the address {host}:{port} cannot be used ({error}): choose another port or host") from error


class BadRequest(RunError):
    """An ambiguous or malformed request."""


def read_headers(scope: Mapping[str, Any]) -> dict[str, str]:
    """Return the headers of a request by name; refuse a repeated one that must be unique."""
    headers: dict[str, str] = {}
    for raw, value in scope["headers"]:
        name = raw.decode("latin-1")
        if name in headers and (name in UNIQUE_HEADERS or name.startswith("atoll-")):
            raise BadRequest(f"the header {name} comes twice: send it once")
        headers[name] = value.decode("latin-1")
    return headers


class TooLarge(RunError):
    """A body that exceeds its limit, or whose length is not stated."""


def content_length(headers: dict[str, str], most: int) -> int:
    """Return the length of a request's body, which must be stated and at most `most`."""
    stated = headers.get("content-length", "0")
    if "transfer-encoding" in headers or not (stated.isascii() and stated.isdigit()) or int(stated[:19]) > most:
        raise TooLarge(
            f"a request of {stated[:19]} bytes, at most {most:,} are taken here: say a Content-Length below that"
        )
    return int(stated)


async def read_body(receive: Callable[[], Awaitable[Any]], most: int) -> bytes:
    """Read a request's body of at most `most` bytes, without allocating what a header merely claims."""
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
