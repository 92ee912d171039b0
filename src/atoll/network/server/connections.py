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

from atoll.network.server.logs import Seldom

HANDSHAKE_SECONDS = 10.0
"""How long TLS may take to begin."""
GOODBYE_SECONDS = 5.0
"""How long it may take to end, with what is still to be sent."""
PAUSE, SHORT_PAUSE = 0.5, 0.02
"""Seconds until connections are taken again after there were no descriptors: if no stranger could go, and else."""
GOING = 16
"""So many strangers go then."""
BURST = 64
"""So many connections are taken at a time, then everything else has its turn."""
BACKLOG = 2048
"""How many connections may wait to be taken."""
MOST_FILES = 1 << 16
"""As many descriptors as are asked of the system."""


class Limits(NamedTuple):
    """How many connections there may be."""

    total: int = 1 << 14
    strangers: int = 2048
    address: int = 1024
    """Of strangers from one address; a network of IPv6 counts as one."""
    client: int = 16


def limits_of(files: int) -> Limits:
    """Limits that leave a quarter of so many descriptors, or 256, to everything else.

    >>> limits_of(1024)
    Limits(total=768, strangers=384, address=192, client=16)
    """
    total = files - min(256, files // 4)
    return Limits(total=total, strangers=min(2048, total // 2), address=min(1024, total // 4))


def more_files() -> int:
    """Ask the system for as many descriptors as it gives; how many there are."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_FILES if hard == resource.RLIM_INFINITY else min(MOST_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST_FILES if soft == resource.RLIM_INFINITY else soft


class Visitor:
    """One connection, and whose it is."""

    def __init__(self, visitors: Visitors, address: str) -> None:
        self._visitors, self.address, self.client = visitors, address, ""
        self.hang_up: Callable[[], object] = lambda: None
        """Ends the connection at once."""

    def known_as(self, client: str) -> None:
        """Somebody has shown on this connection to be a client that may."""
        if self.client != client:
            self._visitors.know(self, client)

    def leave(self) -> None:
        """The connection is over."""
        self._visitors.leave(self)


class Visitors:
    """All connections of a server; for one event loop."""

    def __init__(self, limits: Limits) -> None:
        self._limits, self._num = limits, 0
        self._strangers: dict[str, dict[Visitor, None]] = {}
        self._clients: dict[str, dict[Visitor, None]] = {}

    @property
    def num_strangers(self) -> int:
        """How many are of nobody known."""
        return sum(map(len, self._strangers.values()))

    def admit(self, address: str) -> Visitor | None:
        """Count a new connection, and end an older one if there are too many; None if there is no room at all."""
        visitor = Visitor(self, network_of(address))
        here = self._strangers.setdefault(visitor.address, {})
        here[visitor] = None
        self._num += 1
        if len(here) > self._limits.address:
            self._end(next(iter(here)))
        elif self.num_strangers > self._limits.strangers or self._num > self._limits.total:
            self.make_room()
        return visitor if visitor in here else None

    def make_room(self, num: int = 1) -> None:
        """End the oldest stranger of the address that has most, and so on."""
        for _ in range(min(num, self.num_strangers)):
            most = max(self._strangers, key=lambda address: len(self._strangers[address]))
            self._end(next(iter(self._strangers[most])))

    def know(self, visitor: Visitor, client: str) -> None:
        """A connection is a client's from now on; of too many the client's oldest goes."""
        if self._discard(visitor):
            here = self._clients.setdefault(client, {})
            visitor.client, here[visitor] = client, None
            self._num += 1
            if len(here) > self._limits.client:
                self._end(next(iter(here)))

    def leave(self, visitor: Visitor) -> None:
        """A connection is over."""
        self._discard(visitor)

    def _end(self, visitor: Visitor) -> None:
        self._discard(visitor)
        visitor.hang_up()

    def _discard(self, visitor: Visitor) -> bool:
        groups, key = (self._clients, visitor.client) if visitor.client else (self._strangers, visitor.address)
        here = groups.get(key, {})
        if visitor not in here:
            return False
        del here[visitor]
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
        protocol: Callable[[Visitor], asyncio.BaseProtocol],
        tls: ssl.SSLContext | None,
        visitors: Visitors,
    ) -> None:
        self._socket, self._protocol, self._tls, self._visitors = listener, protocol, tls, visitors
        self._loop = asyncio.get_running_loop()
        self._trouble = Seldom()
        self._greetings: set[asyncio.Task[None]] = set()
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
            for greeting in self._greetings:
                greeting.cancel()

    async def wait_closed(self) -> None:
        """Wait until nothing is left to do."""
        await asyncio.gather(*self._greetings, return_exceptions=True)

    def _open(self) -> None:
        if self._going:
            self._loop.add_reader(self._socket.fileno(), self._take)

    def _take(self) -> None:
        for _ in range(BURST):
            try:
                connection, address = self._socket.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:  # no descriptors, or no memory: asyncio's own loop writes a trace for each
                self._loop.remove_reader(self._socket.fileno())
                pause = SHORT_PAUSE if self._visitors.num_strangers else PAUSE
                self._visitors.make_room(GOING)
                self._trouble.say(f"no connection can be taken ({error}): raise the limit of open files (ulimit -n)")
                self._loop.call_later(pause, self._open)
                return
            visitor = self._visitors.admit(str(address[0]))
            if visitor is None:
                self._trouble.say("there are as many connections as the limit of open files allows (ulimit -n)")
                connection.close()
                continue
            greeting = self._loop.create_task(self._greet(connection, visitor))
            visitor.hang_up = greeting.cancel
            self._greetings.add(greeting)
            greeting.add_done_callback(partial(self._greeted, connection, visitor))

    def _greeted(self, connection: socket.socket, visitor: Visitor, greeting: asyncio.Task[None]) -> None:
        """Close what never began; a task that is ended before its first step cannot do that itself."""
        self._greetings.discard(greeting)
        if greeting.cancelled() or greeting.exception() is not None:
            visitor.leave()
            connection.close()

    async def _greet(self, connection: socket.socket, visitor: Visitor) -> None:
        """Begin TLS; from then on the protocol has the connection, and says when it is over."""
        options: dict[str, Any] = {}
        if self._tls is not None:
            options = {"ssl_handshake_timeout": HANDSHAKE_SECONDS, "ssl_shutdown_timeout": GOODBYE_SECONDS}
        await self._loop.connect_accepted_socket(lambda: self._protocol(visitor), connection, ssl=self._tls, **options)
