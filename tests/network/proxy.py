"""What lies between clients and a server: a line that can be cut, and one that loses answers and repeats requests."""

from __future__ import annotations

import asyncio
import contextlib
import random
import ssl
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

from network.federation import free_port

from atoll.network.client.connection import tls_context as trusting
from atoll.network.server.web import tls_context

Streams = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@contextlib.contextmanager
def _serving(port: int, handle: Streams, tls: ssl.SSLContext | None) -> Iterator[asyncio.AbstractEventLoop]:
    """Serve in a thread until the block ends."""
    loop, ready = asyncio.new_event_loop(), threading.Event()

    async def serve() -> None:
        async def safely(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError, ssl.SSLError):
                await handle(reader, writer)
            with contextlib.suppress(Exception):
                writer.transport.abort()

        server = await asyncio.start_server(safely, "127.0.0.1", port, ssl=tls, backlog=1000, limit=1 << 22)
        ready.set()
        async with server:
            with contextlib.suppress(asyncio.CancelledError):
                await server.serve_forever()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    ready.wait()
    try:
        yield loop
    finally:
        loop.call_soon_threadsafe(lambda: [task.cancel() for task in asyncio.all_tasks(loop)])
        thread.join()


class CuttableProxy:
    """Bytes go through as they are, until it is cut; then there is nobody at the other end."""

    def __init__(self, target: int) -> None:
        self.port, self._target = free_port(), target
        self._is_cut = False
        self._open: set[asyncio.StreamWriter] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self.num_opened = 0

    @contextlib.contextmanager
    def laid(self) -> Iterator[CuttableProxy]:
        """Let bytes through while the block runs."""
        with _serving(self.port, self._handle, None) as self._loop:
            yield self

    def cut(self) -> None:
        """End all connections, and let nobody through."""
        assert self._loop is not None
        self._is_cut = True
        self._loop.call_soon_threadsafe(lambda: [writer.transport.abort() for writer in self._open])

    def mend(self) -> None:
        """Let everybody through again."""
        self._is_cut, self.num_opened = False, 0

    async def _handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._is_cut:
            return
        self.num_opened += 1
        there, to_there = await asyncio.open_connection("127.0.0.1", self._target)
        self._open |= {writer, to_there}
        try:
            await asyncio.gather(_pass_on(reader, to_there), _pass_on(there, writer))
        finally:
            self._open -= {writer, to_there}
            to_there.transport.abort()


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(1 << 16):
        writer.write(data)
        await writer.drain()
    writer.transport.abort()


class FaultyProxy:
    """Reads every request and answer, with the server's own certificate: loses some of both, and repeats requests.

    What becomes of requests is drawn from a deck, which is shuffled anew when it is used up: a request is lost, or its
    answer is (unanswered), or it is made twice and one of both answers is given (doubled), or it is passed on.
    """

    def __init__(self, target: int, certs: Path, seed: int) -> None:
        self.port, self._target, self._certs = free_port(), target, certs
        self._rng, self._left = random.Random(seed), list[str]()
        self.deck = {"passed": 1}
        self._out = trusting(certs / "ca.pem")
        self.did = Counter[str]()
        self.captured: list[bytes] = []
        """Requests."""
        self.answers: list[bytes] = []

    @contextlib.contextmanager
    def between(self) -> Iterator[FaultyProxy]:
        """Do harm while the block runs."""
        with _serving(self.port, self._handle, tls_context(self._certs / "server.pem", self._certs / "server.key")):
            yield self

    async def _handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, to_there = await self._connected()
        try:
            while True:
                request = await _message(reader)
                self.captured.append(request)
                if not self._left:
                    self._left = self._rng.sample(list(self.deck), sum(self.deck.values()), counts=self.deck.values())
                kind = self._left.pop()
                self.did[kind] += 1
                if kind == "lost":
                    return
                to_there.write(request)
                answer = await _message(there)
                self.answers.append(answer)
                if kind == "unanswered":
                    return
                if kind == "doubled":
                    again, to_again = await self._connected()
                    to_again.write(request)
                    second = await _message(again)
                    to_again.transport.abort()
                    answer = second if self._rng.random() < 0.5 else answer
                writer.write(answer)
                await writer.drain()
        finally:
            to_there.transport.abort()

    async def _connected(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection(
            "127.0.0.1", self._target, ssl=self._out, server_hostname="localhost", limit=1 << 22
        )


async def _message(reader: asyncio.StreamReader) -> bytes:
    """A request or an answer, which says how long it is."""
    head = await reader.readuntil(b"\r\n\r\n")
    sizes = [line[15:] for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
    return head + await reader.readexactly(int(sizes[0]) if sizes else 0)
