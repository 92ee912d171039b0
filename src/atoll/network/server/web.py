"""HTTPS with limits: no request may take for ever to arrive, and none is read further than was agreed."""

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
from atoll.network.server.connections import BACKLOG, ConnectionTracker, Limits, Listener, TrackedConnection

App = Callable[[Any, Any, Any], Awaitable[None]]

HEAD_SECONDS = 15.0
"""How long the head of a request may take."""
BODY_SECONDS, BODY_RATE = 10.0, 1 << 14
"""How long a body may take: so many seconds, and one more for so many bytes of it that have come."""
IDLE_SECONDS = 75
"""How long a client's connection without a request is kept: longer than it waits between two polls."""
UNAUTHENTICATED_SECONDS = 20
"""How long one is kept on which nobody has shown who they are."""
MAX_HEAD = 64 * 1024
"""Bytes of a request's head, about: what is longer is cut off."""
MAX_DROPPED = 4 << 20
"""Bytes that are read of a body that nobody wants, so that who sends it hears the answer: the largest has one MiB."""
TLS_RECORD = 16 * 1024
"""Bytes of asyncio's TLS buffer; its default of 256 KiB is most of what a waiting connection costs."""
SEALED, PLAIN = 64 * 1024, 128 * 1024
"""Bytes that are read from a socket at a time, and room for what is decrypted of them: all connections share both."""
GOODBYE_SECONDS = 5
"""How long a shutdown waits for answers that are on their way."""
SINGLE = frozenset({"host", "content-length", "transfer-encoding", "authorization"})
"""Headers that come once, like all of Atoll's own: what reads the first of two may not be what reads the second."""
CONNECTION = "atoll.connection"
"""Under which name an application finds, among a request's extensions, the connection that it came by."""


class RequestTimeouts(NamedTuple):
    """How long a request may take to arrive."""

    head: float = HEAD_SECONDS
    body: float = BODY_SECONDS
    rate: float = BODY_RATE


TIMEOUTS, LIMITS = RequestTimeouts(), Limits()


class NotifyingFlowControl(FlowControl):
    """uvicorn's flow control, which also tells when somebody wants to read on."""

    def __init__(self, transport: asyncio.Transport, resumed: Callable[[], None]) -> None:
        super().__init__(transport)
        self._resumed = resumed

    def resume_reading(self) -> None:
        """Read on."""
        if self.read_paused:
            self._resumed()
        super().resume_reading()


class DeadlineProtocol(HttpToolsProtocol, asyncio.BufferedProtocol):
    """uvicorn's HTTP/1.1, with deadlines for the head and the body of each request, and a limit to its head.

    Of a body no more is read than came with its head, until the application asks for it: then its time begins. What is
    read lies in buffers that the connections of a server share: it is read on before another one reads.
    """

    timeouts: RequestTimeouts
    sealed: bytearray
    plain: memoryview
    _timer: asyncio.TimerHandle | None = None
    _since = 0.0
    """When the body began to be read."""
    _body_bytes = 0
    _head_bytes = 0
    _in_head = True
    _whole = False
    _held = False
    _parts: list[bytes]

    def __init__(self, connection: TrackedConnection, **options: Any) -> None:
        super().__init__(**options)
        self._connection = connection
        self._parts = []
        self.timeout_keep_alive = UNAUTHENTICATED_SECONDS

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Expect a request; answers leave at once, which asyncio sees to only on sockets that it made itself."""
        super().connection_made(transport)
        self._connection.abort = transport.abort
        self.flow = NotifyingFlowControl(transport, self._resumed)
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        tls = getattr(transport, "_ssl_protocol", None)
        if isinstance(tls, SSLProtocol):
            tls._ssl_buffer, tls._ssl_buffer_view = self.sealed, memoryview(self.sealed)  # type: ignore[attr-defined]
        self._allow(self.timeouts.head)

    def get_buffer(self, sizehint: int) -> memoryview:
        """Where decrypted bytes are put."""
        return self.plain

    def buffer_updated(self, nbytes: int) -> None:
        """Some are there."""
        self.data_received(self.plain[:nbytes])  # type: ignore[arg-type]

    def data_received(self, data: bytes) -> None:
        """Take some bytes of a request; when it is whole the clock stops."""
        if self._timer is None:
            self._allow(self.timeouts.head)
        if self._in_head:
            self._head_bytes += len(data)
        else:
            self._body_bytes += len(data)
        super().data_received(data)
        if self._whole:
            self._whole = False
            self._stop_clock()
        elif not self._in_head and not self._held:  # the rest of the body is read when somebody wants it
            self._held = True
            self._stop_clock()
            self.flow.pause_reading()
        if not self._in_head and self._body_bytes > MAX_DROPPED and self.cycle.response_complete:
            self.transport.abort()
        if self._head_bytes > MAX_HEAD and not self.transport.is_closing():
            self.send_400_response("the head of this request does not end")

    def on_message_begin(self) -> None:
        """The first bytes of a request are here."""
        self._whole = self._held = False
        self._allow(self.timeouts.head)
        super().on_message_begin()
        self.scope["extensions"] = {CONNECTION: self._connection}  # type: ignore[dict-item]

    def on_headers_complete(self) -> None:
        """The head is whole."""
        self._in_head, self._head_bytes, self._body_bytes = False, 0, 0
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
        self.timeout_keep_alive = IDLE_SECONDS if self._connection.client else UNAUTHENTICATED_SECONDS
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the clock."""
        self._stop_clock()
        self._connection.release()
        super().connection_lost(exc)

    def _resumed(self) -> None:
        """Let the clock of a body run, from now on if it stood still."""
        if not self._in_head and self._timer is None:
            self._since, self._body_bytes = self.loop.time(), 0
            self._allow(self.timeouts.body)

    def _allow(self, seconds: float) -> None:
        self._stop_clock()
        self._timer = self.loop.call_later(seconds, self._look)

    def _stop_clock(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        """Cut off who is too slow; who sends a body fast enough has more time."""
        self._timer = None
        left = 0.0
        if not self._in_head:
            left = self._since + self.timeouts.body + self._body_bytes / self.timeouts.rate - self.loop.time()
        if left > 0:
            self._allow(left)
        else:
            self.transport.abort()


class WebServer(uvicorn.Server):
    """uvicorn's server with a listener of its own, which knows how many connections there are and of whom."""

    def __init__(self, config: uvicorn.Config, tls: ssl.SSLContext | None, limits: Limits) -> None:
        super().__init__(config)
        self._tls, self._tracker = tls, ConnectionTracker(limits)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen."""
        await self.lifespan.startup()

        def protocol(connection: TrackedConnection) -> asyncio.BaseProtocol:
            made: Any = self.config.http_protocol_class
            whole: asyncio.BaseProtocol = made(
                connection, config=self.config, server_state=self.server_state, app_state=self.lifespan.state
            )
            return whole

        sockets = sockets or [listening_socket(self.config.host, self.config.port)]
        self.servers: list[Any] = [Listener(each, protocol, self._tls, self._tracker) for each in sockets]
        self.started = True


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


def web_server(
    app: App,
    host: str,
    port: int,
    tls: ssl.SSLContext | None,
    timeouts: RequestTimeouts = TIMEOUTS,
    limits: Limits = LIMITS,
) -> WebServer:
    """A uvicorn server that is ready to run; without `tls` it is for this machine only."""
    if tls is None and host not in ("127.0.0.1", "::1", "localhost"):
        raise RunError(f"{host} can be reached from elsewhere: give a certificate, e.g. by atoll certs")
    SSLProtocol.max_size = TLS_RECORD
    buffers = {"sealed": bytearray(SEALED), "plain": memoryview(bytearray(PLAIN))}
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
    """A socket that listens at an address; with port 0 the system chooses one."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise RunError(f"the address {host}:{port} cannot be used ({error}): choose another port or host") from error


class BadRequest(RunError):
    """A request that can be read in two ways, or in none."""


def read_headers(scope: Mapping[str, Any]) -> dict[str, str]:
    """The headers of a request by their names; one that counts and comes twice is refused."""
    headers: dict[str, str] = {}
    for raw, value in scope["headers"]:
        name = raw.decode("latin-1")
        if name in headers and (name in SINGLE or name.startswith("atoll-")):
            raise BadRequest(f"the header {name} comes twice: send it once")
        headers[name] = value.decode("latin-1")
    return headers


class TooLarge(RunError):
    """A body that is longer than was agreed."""


def content_length(headers: dict[str, str], most: int) -> int:
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
