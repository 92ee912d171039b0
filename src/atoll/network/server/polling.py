"""Polls that wait for work: answered when there is some, when their time is up, or when the server ends."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from atoll.network.protocol.endpoints import POLL
from atoll.network.protocol.messages import Orders, Poll
from atoll.network.server.operations import Operations
from atoll.network.server.request import Request
from atoll.network.server.tables import ClientRow

InThread = Callable[[Callable[[], Orders]], Awaitable[Orders]]
"""Runs a function that may wait for the disk outside of the event loop."""


class WaitingPolls:
    """The polls of one event loop; a client has one at a time."""

    def __init__(self, operations: Operations, in_thread: InThread) -> None:
        self._operations, self._handler, self._in_thread = operations, operations.handler, in_thread
        self._events: dict[int, asyncio.Event] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ending = False

    def end(self) -> None:
        """Answer all polls, so that the process can end."""
        self._ending = True
        for event in self._events.values():
            event.set()

    def wake(self, numbers: set[int]) -> None:
        """Let the polls of these clients look for work again; may be called from any thread."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._set_events, numbers)

    def _set_events(self, numbers: set[int]) -> None:
        for number in numbers:
            event = self._events.get(number)
            if event is not None:
                event.set()

    async def answer(self, request: Request) -> Orders:
        """Return the client's orders as soon as there are some, in the event loop as long as memory is enough."""
        request.check_body()
        poll, number = request.parse(POLL), request.client.number
        assert number is not None
        self._loop = asyncio.get_running_loop()
        event = asyncio.Event()
        before, self._events[number] = self._events.get(number), event
        if before is not None:
            before.set()
        try:
            written = self._handler.note_poll(request.client, poll)
            if written is not None:
                await asyncio.wrap_future(written)
            orders = await self._orders(request.client, poll)
            if not orders.orders and set(orders.ended) <= set(poll.ended) and poll.wait and not self._ending:
                with self._operations.metrics.waiting():
                    try:
                        await asyncio.wait_for(event.wait(), poll.wait)
                    except TimeoutError:
                        return orders
                orders = await self._orders(request.client, poll)
        finally:
            if self._events.get(number) is event:
                del self._events[number]
        return orders

    async def _orders(self, client: ClientRow, poll: Poll) -> Orders:
        """Look for work; in a thread while the writer holds the lock, which may take as long as files are written."""
        lock = self._operations.driver.writer.lock
        if not lock.acquire(blocking=False):
            return await self._in_thread(lambda: self._handler.orders(client, poll))
        try:
            return self._handler.orders(client, poll)
        finally:
            lock.release()
