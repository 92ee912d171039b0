"""Limits of connections, of request bodies in memory and of unauthenticated requests.

A connection is unauthenticated until an approved client has signed a request on it. Unauthenticated connections are
limited: one more evicts the oldest of the address that has most, so that nobody can lock others out, and no client is
refused in favour of a stranger.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import resource
import socket
import ssl
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from http import HTTPStatus
from typing import Any, NamedTuple, TypeVar

from atoll.network.server.auth import Refused
from atoll.network.server.monitoring import RateLimitedLog

HANDSHAKE_SECONDS = 10.0
"""Maximum time of a TLS handshake."""
GOODBYE_SECONDS = 5.0
"""Maximum time of a TLS shutdown, with what is still to be sent."""
PAUSE, SHORT_PAUSE = 0.5, 0.02
"""Seconds until accepting again after a lack of descriptors: if nothing could be evicted, and else."""
EVICTED_AT_ONCE = 16
"""Connections that are evicted at a lack of descriptors."""
BURST = 64
"""Connections that are accepted in a row, before the event loop does other work."""
BACKLOG = 2048
"""Connections that may wait to be accepted."""
MAX_FILES = 1 << 16
"""File descriptors that are asked of the system."""
T = TypeVar("T")
UNCOUNTED_BYTES = 1 << 14
"""Bodies up to this size are not counted."""
MAX_TOTAL_BYTES = 256 << 20
"""Maximum bytes of all other bodies in memory."""
MAX_BODIES_PER_CLIENT = 4
"""Maximum number of bodies of a client in memory."""
MAX_WAIT_SECONDS = 20.0
"""Seconds until a waiting request is refused: clients wait a minute for an answer in all."""
MAX_UNAUTHENTICATED, MAX_UNAUTHENTICATED_PER_ADDRESS = 8, 2
"""Maximum number of unauthenticated requests in work, in all and of one address."""


class Limits(NamedTuple):
    """Maximum numbers of connections."""

    total: int = 1 << 14
    unauthenticated: int = 2048
    address: int = 1024
    """Unauthenticated ones of one address; a /64 of IPv6 counts as one."""
    client: int = 16


def connection_limits(files: int) -> Limits:
    """Return limits that leave a quarter of the file descriptors, or 256, to everything else.

    >>> connection_limits(1024)
    Limits(total=768, unauthenticated=384, address=192, client=16)
    """
    total = files - min(256, files // 4)
    return Limits(total=total, unauthenticated=min(2048, total // 2), address=min(1024, total // 4))


def raise_file_limit() -> int:
    """Raise the limit of file descriptors as far as the system allows; return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_FILES if hard == resource.RLIM_INFINITY else min(MAX_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_FILES if soft == resource.RLIM_INFINITY else soft


class TrackedConnection:
    """One connection, and the client that it belongs to."""

    def __init__(self, tracker: ConnectionTracker, address: str) -> None:
        self._tracker, self.address, self.client = tracker, address, ""
        self.abort: Callable[[], object] = lambda: None
        """Closes the connection at once."""

    def authenticate(self, client: str) -> None:
        """Note that a client has signed a request on this connection."""
        if self.client != client:
            self._tracker.authenticate(self, client)

    def release(self) -> None:
        """Note that the connection is closed."""
        self._tracker.release(self)


class ConnectionTracker:
    """Counts and limits the connections of a server; for one event loop."""

    def __init__(self, limits: Limits) -> None:
        self._limits, self._total = limits, 0
        self._unauthenticated: dict[str, dict[TrackedConnection, None]] = {}
        self._clients: dict[str, dict[TrackedConnection, None]] = {}

    @property
    def num_unauthenticated(self) -> int:
        """Return the number of unauthenticated connections."""
        return sum(map(len, self._unauthenticated.values()))

    def admit(self, address: str) -> TrackedConnection | None:
        """Count a new connection, and evict an older one beyond the limits; None if it cannot be admitted."""
        connection = TrackedConnection(self, address_group(address))
        here = self._unauthenticated.setdefault(connection.address, {})
        here[connection] = None
        self._total += 1
        if len(here) > self._limits.address:
            self._evict_one(next(iter(here)))
        elif self.num_unauthenticated > self._limits.unauthenticated or self._total > self._limits.total:
            self.evict()
        return connection if connection in here else None

    def evict(self, num: int = 1) -> None:
        """Close unauthenticated connections: each time the oldest of the address that has most."""
        for _ in range(min(num, self.num_unauthenticated)):
            most = max(self._unauthenticated, key=lambda address: len(self._unauthenticated[address]))
            self._evict_one(next(iter(self._unauthenticated[most])))

    def authenticate(self, connection: TrackedConnection, client: str) -> None:
        """Assign a connection to a client; beyond its limit, the client's oldest is closed."""
        if self._discard(connection):
            here = self._clients.setdefault(client, {})
            connection.client, here[connection] = client, None
            self._total += 1
            if len(here) > self._limits.client:
                self._evict_one(next(iter(here)))

    def release(self, connection: TrackedConnection) -> None:
        """Stop counting a connection."""
        self._discard(connection)

    def _evict_one(self, connection: TrackedConnection) -> None:
        self._discard(connection)
        connection.abort()

    def _discard(self, connection: TrackedConnection) -> bool:
        groups, key = (
            (self._clients, connection.client) if connection.client else (self._unauthenticated, connection.address)
        )
        here = groups.get(key, {})
        if connection not in here:
            return False
        del here[connection]
        self._total -= 1
        if not here:
            del groups[key]
        return True


def address_group(address: str) -> str:
    """Return what counts as one address: the /64 of an IPv6 address.

    >>> address_group("192.0.2.7"), address_group("2001:db8::1:2:3:4")
    ('192.0.2.7', '2001:db8::/64')
    """
    with contextlib.suppress(ValueError):
        parsed = ipaddress.ip_address(address.partition("%")[0])
        if parsed.version == 6 and parsed.ipv4_mapped is None:
            return str(ipaddress.ip_network((int(parsed) >> 64 << 64, 64)))
        return str(parsed if parsed.version == 4 else parsed.ipv4_mapped)
    return address


class Listener:
    """Accepts connections from a socket; after a failure it pauses, logs once, and goes on."""

    def __init__(
        self,
        listener: socket.socket,
        protocol: Callable[[TrackedConnection], asyncio.BaseProtocol],
        tls: ssl.SSLContext | None,
        tracker: ConnectionTracker,
    ) -> None:
        self._socket, self._protocol, self._tls, self._tracker = listener, protocol, tls, tracker
        self._loop = asyncio.get_running_loop()
        self._trouble = RateLimitedLog()
        self._handshakes: set[asyncio.Task[None]] = set()
        self._going = True
        listener.setblocking(False)
        listener.listen(BACKLOG)
        self._resume()

    def close(self) -> None:
        """Stop accepting, and cancel handshakes."""
        if self._going:
            self._going = False
            self._loop.remove_reader(self._socket.fileno())
            self._socket.close()
            for handshake in self._handshakes:
                handshake.cancel()

    async def wait_closed(self) -> None:
        """Wait until all handshakes have ended."""
        await asyncio.gather(*self._handshakes, return_exceptions=True)

    def _resume(self) -> None:
        if self._going:
            self._loop.add_reader(self._socket.fileno(), self._accept)

    def _accept(self) -> None:
        for _ in range(BURST):
            try:
                client_socket, address = self._socket.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:  # no descriptors, or no memory: asyncio's own server logs a trace for each
                self._loop.remove_reader(self._socket.fileno())
                pause = SHORT_PAUSE if self._tracker.num_unauthenticated else PAUSE
                self._tracker.evict(EVICTED_AT_ONCE)
                self._trouble.write(f"no connection can be taken ({error}): raise the limit of open files (ulimit -n)")
                self._loop.call_later(pause, self._resume)
                return
            connection = self._tracker.admit(str(address[0]))
            if connection is None:
                self._trouble.write("there are as many connections as the limit of open files allows (ulimit -n)")
                client_socket.close()
                continue
            handshake = self._loop.create_task(self._handshake(client_socket, connection))
            connection.abort = handshake.cancel
            self._handshakes.add(handshake)
            handshake.add_done_callback(partial(self._handshake_done, client_socket, connection))

    def _handshake_done(
        self, client_socket: socket.socket, connection: TrackedConnection, handshake: asyncio.Task[None]
    ) -> None:
        """Close a connection whose handshake failed; a task cancelled before its first step cannot do so itself."""
        self._handshakes.discard(handshake)
        if handshake.cancelled() or handshake.exception() is not None:
            connection.release()
            client_socket.close()

    async def _handshake(self, client_socket: socket.socket, connection: TrackedConnection) -> None:
        """Do the TLS handshake; from then on the protocol owns the connection."""
        options: dict[str, Any] = {}
        if self._tls is not None:
            options = {"ssl_handshake_timeout": HANDSHAKE_SECONDS, "ssl_shutdown_timeout": GOODBYE_SECONDS}
        await self._loop.connect_accepted_socket(
            lambda: self._protocol(connection), client_socket, ssl=self._tls, **options
        )


class BodyLimits:
    """Bounds the memory of request bodies: FIFO, with a cap per client; for one event loop."""

    def __init__(self, num_bytes: int = MAX_TOTAL_BYTES, max_wait: float = MAX_WAIT_SECONDS) -> None:
        self._left, self._max_wait = num_bytes, max_wait
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._bodies: Counter[str] = Counter()
        self._patient: Counter[str] = Counter()
        self._turns: dict[str, asyncio.Semaphore] = {}

    @asynccontextmanager
    async def reserve(self, who: str, num_bytes: int, *, patient: bool = False) -> AsyncIterator[None]:
        """Reserve memory for a body while the block runs; in the order of arrival.

        A client's body beyond its number is refused; `patient` ones, of which there are as many again, wait their turn.
        """
        if num_bytes <= UNCOUNTED_BYTES:
            yield
            return
        if patient:
            async with self._own_turn(who):
                await self._wait_for_turn(num_bytes)
                try:
                    yield
                finally:
                    self._left += num_bytes
                    self._admit_waiting()
            return
        if self._bodies[who] >= MAX_BODIES_PER_CLIENT:
            raise Refused(
                HTTPStatus.TOO_MANY_REQUESTS,
                f"{MAX_BODIES_PER_CLIENT} requests of this client are being read",
                retry=1.0,
            )
        self._bodies[who] += 1
        try:
            await self._wait_for_turn(num_bytes)
            try:
                yield
            finally:
                self._left += num_bytes
                self._admit_waiting()
        finally:
            self._bodies[who] -= 1
            if not self._bodies[who]:
                del self._bodies[who]

    @asynccontextmanager
    async def _own_turn(self, who: str) -> AsyncIterator[None]:
        """Wait until few enough bodies of patient requests of a client are being read."""
        self._patient[who] += 1
        try:
            async with self._turns.setdefault(who, asyncio.Semaphore(MAX_BODIES_PER_CLIENT)):
                yield
        finally:
            self._patient[who] -= 1
            if not self._patient[who]:
                del self._patient[who], self._turns[who]

    async def _wait_for_turn(self, num_bytes: int) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((num_bytes, turn))
        self._admit_waiting()
        try:
            async with asyncio.timeout(self._max_wait):
                await turn
        except (asyncio.CancelledError, TimeoutError) as error:
            if turn.done() and not turn.cancelled():  # it was admitted a moment before
                self._left += num_bytes
            self._admit_waiting()
            if isinstance(error, TimeoutError):
                why = "the server reads as much as it has room for: come again"
                raise Refused(HTTPStatus.SERVICE_UNAVAILABLE, why, retry=1.0) from error
            raise

    def _admit_waiting(self) -> None:
        """Admit waiting bodies in order, as long as there is memory."""
        while self._waiting and (self._waiting[0][1].done() or self._waiting[0][0] <= self._left):
            num_bytes, turn = self._waiting.popleft()
            if not turn.done():
                self._left -= num_bytes
                turn.set_result(None)


class UnauthenticatedPool:
    """Threads for unauthenticated requests: few in all, fewer of one address; for one event loop.

    They are separate, so that no client waits for a stranger.
    """

    def __init__(self, num: int = MAX_UNAUTHENTICATED, each: int = MAX_UNAUTHENTICATED_PER_ADDRESS) -> None:
        self._threads, self._each = ThreadPoolExecutor(num, thread_name_prefix="unauthenticated"), each
        self._turns: dict[str, asyncio.Semaphore] = {}
        self._num_requests: Counter[str] = Counter()

    async def run(self, address: str, work: Callable[[], T]) -> T:
        """Do work for an address when its turn comes."""
        self._num_requests[address] += 1
        try:
            async with self._turns.setdefault(address, asyncio.Semaphore(self._each)):
                return await asyncio.get_running_loop().run_in_executor(self._threads, work)
        finally:
            self._num_requests[address] -= 1
            if not self._num_requests[address]:
                del self._num_requests[address], self._turns[address]

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown()
