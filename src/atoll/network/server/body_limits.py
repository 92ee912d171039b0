"""Limits of concurrent work: memory of request bodies, and requests that are not authenticated."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import TypeVar

from atoll.network.server.auth import Refused

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


class BodyLimits:
    """Bounds the memory of request bodies: FIFO, with a cap per client; for one event loop."""

    def __init__(self, num_bytes: int = MAX_TOTAL_BYTES, max_wait: float = MAX_WAIT_SECONDS) -> None:
        self._left, self._max_wait = num_bytes, max_wait
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._bodies: Counter[str] = Counter()

    @asynccontextmanager
    async def reserve(self, who: str, num_bytes: int) -> AsyncIterator[None]:
        """Reserve memory for a body while the block runs; in the order of arrival."""
        if num_bytes <= UNCOUNTED_BYTES:
            yield
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
