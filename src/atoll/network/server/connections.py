"""Connections of a server: how many there may be and of whom, and a listener that survives a lack of descriptors.

A connection is a stranger's until a request on it is signed by a client that may. Strangers are few, and when one more
comes the oldest goes of the address that has most: nobody can keep the others out, and no client is ever put off for
a stranger.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import resource
import socket
import ssl
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from atoll.network.server.logs import RateLimitedLog

HANDSHAKE_SECONDS = 10.0
"""How long TLS may take to begin."""
GOODBYE_SECONDS = 5.0
"""How long it may take to end, with what is still to be sent."""
PAUSE, SHORT_PAUSE = 0.5, 0.02
"""Seconds until connections are taken again after there were no descriptors: if no stranger could go, and else."""
EVICTED_AT_ONCE = 16
"""So many strangers go then."""
BURST = 64
"""So many connections are taken at a time, then everything else has its turn."""
BACKLOG = 2048
"""How many connections may wait to be taken."""
MAX_FILES = 1 << 16
"""As many descriptors as are asked of the system."""


class Limits(NamedTuple):
    """How many connections there may be."""

    total: int = 1 << 14
    unauthenticated: int = 2048
    address: int = 1024
    """Of strangers from one address; a network of IPv6 counts as one."""
    client: int = 16


def connection_limits(files: int) -> Limits:
    """Limits that leave a quarter of so many descriptors, or 256, to everything else.

    >>> connection_limits(1024)
    Limits(total=768, unauthenticated=384, address=192, client=16)
    """
    total = files - min(256, files // 4)
    return Limits(total=total, unauthenticated=min(2048, total // 2), address=min(1024, total // 4))


def raise_file_limit() -> int:
    """Ask the system for as many descriptors as it gives; how many there are."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_FILES if hard == resource.RLIM_INFINITY else min(MAX_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_FILES if soft == resource.RLIM_INFINITY else soft


class TrackedConnection:
    """One connection, and whose it is."""

    def __init__(self, tracker: ConnectionTracker, address: str) -> None:
        self._tracker, self.address, self.client = tracker, address, ""
        self.abort: Callable[[], object] = lambda: None
        """Ends the connection at once."""

    def authenticate(self, client: str) -> None:
        """Somebody has shown on this connection to be a client that may."""
        if self.client != client:
            self._tracker.authenticate(self, client)

    def release(self) -> None:
        """The connection is over."""
        self._tracker.release(self)


class ConnectionTracker:
    """All connections of a server; for one event loop."""

    def __init__(self, limits: Limits) -> None:
        self._limits, self._num = limits, 0
        self._unauthenticated: dict[str, dict[TrackedConnection, None]] = {}
        self._clients: dict[str, dict[TrackedConnection, None]] = {}

    @property
    def num_unauthenticated(self) -> int:
        """How many are of nobody known."""
        return sum(map(len, self._unauthenticated.values()))

    def admit(self, address: str) -> TrackedConnection | None:
        """Count a new connection, and end an older one if there are too many; None if there is no room at all."""
        connection = TrackedConnection(self, network_of(address))
        here = self._unauthenticated.setdefault(connection.address, {})
        here[connection] = None
        self._num += 1
        if len(here) > self._limits.address:
            self._evict_one(next(iter(here)))
        elif self.num_unauthenticated > self._limits.unauthenticated or self._num > self._limits.total:
            self.evict()
        return connection if connection in here else None

    def evict(self, num: int = 1) -> None:
        """End the oldest stranger of the address that has most, and so on."""
        for _ in range(min(num, self.num_unauthenticated)):
            most = max(self._unauthenticated, key=lambda address: len(self._unauthenticated[address]))
            self._evict_one(next(iter(self._unauthenticated[most])))

    def authenticate(self, connection: TrackedConnection, client: str) -> None:
        """A connection is a client's from now on; of too many the client's oldest goes."""
        if self._discard(connection):
            here = self._clients.setdefault(client, {})
            connection.client, here[connection] = client, None
            self._num += 1
            if len(here) > self._limits.client:
                self._evict_one(next(iter(here)))

    def release(self, connection: TrackedConnection) -> None:
        """A connection is over."""
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
        self._num -= 1
        if not here:
            del groups[key]
        return True


def network_of(address: str) -> str:
    """What counts as one address: of IPv6 the 64 bits that a household has.

    >>> network_of("192.0.2.7"), network_of("2001:db8::1:2:3:4")
    ('192.0.2.7', '2001:db8::/64')
    """
    with contextlib.suppress(ValueError):
        found = ipaddress.ip_address(address.partition("%")[0])
        if found.version == 6 and found.ipv4_mapped is None:
            return str(ipaddress.ip_network((int(found) >> 64 << 64, 64)))
        return str(found if found.version == 4 else found.ipv4_mapped)
    return address


class Listener:
    """Takes connections from a socket; where that fails it waits a little, says so once, and goes on."""

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
        self._open()

    def close(self) -> None:
        """Take no more connections, and end those that have not begun."""
        if self._going:
            self._going = False
            self._loop.remove_reader(self._socket.fileno())
            self._socket.close()
            for handshake in self._handshakes:
                handshake.cancel()

    async def wait_closed(self) -> None:
        """Wait until nothing is left to do."""
        await asyncio.gather(*self._handshakes, return_exceptions=True)

    def _open(self) -> None:
        if self._going:
            self._loop.add_reader(self._socket.fileno(), self._take)

    def _take(self) -> None:
        for _ in range(BURST):
            try:
                client_socket, address = self._socket.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:  # no descriptors, or no memory: asyncio's own loop writes a trace for each
                self._loop.remove_reader(self._socket.fileno())
                pause = SHORT_PAUSE if self._tracker.num_unauthenticated else PAUSE
                self._tracker.evict(EVICTED_AT_ONCE)
                self._trouble.write(f"no connection can be taken ({error}): raise the limit of open files (ulimit -n)")
                self._loop.call_later(pause, self._open)
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
        """Close what never began; a task that is ended before its first step cannot do that itself."""
        self._handshakes.discard(handshake)
        if handshake.cancelled() or handshake.exception() is not None:
            connection.release()
            client_socket.close()

    async def _handshake(self, client_socket: socket.socket, connection: TrackedConnection) -> None:
        """Begin TLS; from then on the protocol has the connection, and says when it is over."""
        options: dict[str, Any] = {}
        if self._tls is not None:
            options = {"ssl_handshake_timeout": HANDSHAKE_SECONDS, "ssl_shutdown_timeout": GOODBYE_SECONDS}
        await self._loop.connect_accepted_socket(
            lambda: self._protocol(connection), client_socket, ssl=self._tls, **options
        )
